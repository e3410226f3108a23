"""Hosts on one machine: each node's launcher in a session of its own, everything marked, nothing left behind.

A node is what carries its name in the environment: launcher, agents, workers, and whatever they start. With a network every node lives in
a namespace with an address and a hostname of its own. May not know which system is launched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bench.compare.measure import Record
from bench.compare.network import Network
from tmrun import procs

MARK = "BENCH_TRIAL"
NODE = "BENCH_NODE"
POLL_S = 0.02


class TrialError(Exception):
    """The trial could not be carried out; says why in one line."""


class NotReady(Exception):
    """The system did not come so far that something could happen to it; says what was missing in one line."""


class Refused(Exception):
    """The system declined what was asked of it; says why in one line."""


@dataclass
class Node:
    """One host."""

    name: str
    launcher: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")


@dataclass
class Lab:
    """A trial's hosts, files and ports; a context manager that removes them all."""

    marker: str
    logs: Path
    network: Network | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    folder: Path = Path()
    _read: dict[Path, int] = field(default_factory=dict)
    _records: list[Record] = field(default_factory=list)
    _own: set[int] = field(default_factory=procs.children)

    def __enter__(self) -> Lab:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))  # short: unix sockets live below it
        for name in ("steps", "tmp"):
            (self.folder / name).mkdir()
        self.logs.mkdir(parents=True, exist_ok=True)
        procs.adopt_orphans()
        try:
            if self.network is not None:
                self.network.open()
        except subprocess.CalledProcessError as error:
            self._clean()
            raise TrialError(f"no network: {error.stderr.decode(errors='replace').strip()}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._clean():
            raise TrialError("a process of the trial cannot be killed")

    def _clean(self) -> bool:
        """Whether everything is gone."""
        gone = procs.sweep(self.marker, MARK)
        for node in self.nodes.values():
            try:
                node.launcher.wait(10)
            except subprocess.TimeoutExpired:
                gone = False
        procs.reap_orphans(self._own)
        if self.network is not None:
            self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return gone

    # -- hosts ----------------------------------------------------------------------------------------------------------------------
    def address(self, name: str) -> str:
        """Where the others find this node."""
        return self.network.address(name) if self.network else "127.0.0.1"

    @property
    def interface(self) -> str:
        """The network interface that carries the nodes' traffic."""
        return "eth0" if self.network else "lo"

    def port(self) -> int:
        """One that is free now, and the next one too."""
        for _ in range(100):
            with socket.socket() as one, socket.socket() as two:
                one.bind(("", 0))
                port: int = one.getsockname()[1]
                try:
                    two.bind(("", port + 1))
                except (OSError, OverflowError):
                    continue
                return port
        raise TrialError("no two free ports in a row")

    def environment(self, name: str, more: Mapping[str, str]) -> dict[str, str]:
        """Of the node ``name``: this process's, without its Python's ways."""
        own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
        marks = {MARK: self.marker, NODE: f"{self.marker}/{name}", "BENCH_NODE_NAME": name}
        return {
            **own,
            **marks,
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.interface,
            "PYTHONUNBUFFERED": "1",
            **more,
        }

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Node:
        """Launch a node."""
        log = self.logs / f"{name}.log"
        with log.open("wb") as out:
            launcher = subprocess.Popen(
                self.network.inside(name, argv) if self.network else list(argv),
                env=self.environment(name, env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )
        node = Node(name, launcher, log)
        self.nodes[name] = node
        self._own.add(launcher.pid)
        return node

    def aside(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start something that is no node: an operator's command."""
        with log.open("wb") as out:
            started = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._own.add(started.pid)  # its exit code is wanted: not to be reaped with the orphans
        return started

    def pids(self, name: str) -> list[int]:
        """Everything that lives on a node."""
        return procs.marked(f"{self.marker}/{name}", NODE)

    def signal(self, name: str, *numbers: signal.Signals) -> None:
        """To everything on a node: each signal to all before the next one."""
        for number in numbers:
            for pid in self.pids(name):
                kill(pid, number)

    def slow(self, name: str) -> None:
        """From now on that host is slow, whoever works on it."""
        (self.folder / f"slow-{name}").touch()

    def all_ended(self, *but: str) -> bool:
        """Whether every launcher, ``but`` these, has ended."""
        procs.reap_orphans(self._own)
        return all(n.launcher.poll() is not None for n in self.nodes.values() if n.name not in but)

    # -- what the workers wrote -----------------------------------------------------------------------------------------------------
    def records(self) -> list[Record]:
        """All step records so far; half a line is left for the next look."""
        for path in (self.folder / "steps").glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            self._records += [Record(**json.loads(line)) for line in text[:whole].splitlines()]
        return self._records

    def wait(self, what: str, condition: Callable[[], object], seconds: float, pause_s: float = POLL_S) -> None:
        """Poll until true. Raises NotReady on the deadline, or when every launcher has ended."""
        end = time.monotonic() + seconds
        while not condition():
            if self.all_ended():
                raise NotReady(f"every launcher ended before: {what}")
            if time.monotonic() > end:
                raise NotReady(f"not within {seconds:.0f} s: {what}")
            time.sleep(pause_s)


def kill(pid: int, number: signal.Signals) -> None:
    """Send it, if it still lives."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
