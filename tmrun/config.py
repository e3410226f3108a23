"""What a launcher tells its agents, as one JSON file in the job's runtime folder.

May not know: where the values come from (flags, environment, files), what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tmrun.core import codec
from tmrun.core.streams import Output


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """How to reach a job's store. Holds no secret: passwords come from the environment, keys are files only their owner can read.

    ``endpoints`` as typed (``http://a:2379,http://b:2379``); ``ca``, ``cert``, ``key``: paths of PEM files, empty where there is none.
    """

    endpoints: str
    user: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class NoticeSources:
    """Who is asked whether this machine goes away. ``kubernetes_server``: URL of the API; ``deadline_s``: see ``--notice-deadline``."""

    files: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    kubernetes_node: str = ""
    kubernetes_server: str = ""
    deadline_s: float = 0.0


def beacon_path(runtime_dir: str, host: str) -> Path:
    """Where an agent shows its launcher that it lives."""
    return Path(runtime_dir) / f"{host}.agent.beacon"


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One agent's identity and surroundings. ``address``: how other hosts reach this one."""

    job: str
    host: str
    store: StoreAccess
    address: str
    runtime_dir: str
    marker: str
    """Value of $TMRUN_MARKER in every process of this launcher; what the sweeper looks for."""
    parent_pid: int
    command: tuple[str, ...]
    """What this host runs; its arguments may differ from those of other hosts (``Spec.command``)."""
    labels: dict[str, str] = field(default_factory=dict)
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    metrics: str = ""
    """``HOST:PORT`` on which this agent is asked for its metrics; empty: on none."""
    node_rank: int = -1
    """The slot that this node wants; -1: any."""
    master_port: int = 0
    """The port wished for the job's TCPStore; 0: any."""
    output: Output = field(default_factory=Output)
    signals: tuple[int, ...] = ()
    """What ends the job, for torch's own variable in the workers."""
    cpus: tuple[str, ...] = ()
    """On which CPUs each worker runs, by local rank; empty: on all."""
    store_wait_s: float = 0.0
    """How long a store that does not answer is asked again before this agent has registered."""
    notices: NoticeSources = NoticeSources()
    witness: str = ""
    """Where others ask whether the launch is gone (``witness``); empty: nowhere."""
    store_members: int = 0
    """Of how many etcds the job's store consists, if this host runs one of them; 0: it does not."""
    witness_fd: int = -1
    """The socket behind it, which every process of the launch holds; -1: none."""

    def save(self, path: Path) -> None:
        """Write, readable by the owner only."""
        path.touch(mode=0o600)
        path.write_text(codec.encode(self))

    @staticmethod
    def load(path: Path) -> AgentConfig:
        """Read what ``save`` wrote."""
        return codec.decode(AgentConfig, path.read_text())
