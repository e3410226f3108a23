"""torchft: a replica group a host under its own torchrun, the lighthouse on node0. Tuned: a dead replica is noticed after 1 s, not 5."""

from __future__ import annotations

from pathlib import Path

from bench.compare.systems.base import System

LIGHTHOUSE = "lighthouse"


class TorchFt(System):
    """No spare: the world shrinks, and grows again when the group's worker is back."""

    venv = "torchft"
    script = "torchft_ddp.py"
    spare = False

    def start_all(self) -> None:
        """The lighthouse is a process of node0: what happens to that host happens to it."""
        program = str(Path(self.python).with_name("torchft_lighthouse"))
        # join_timeout: how long a quorum waits for a replica that lives but does not ask; the default of a minute is kept
        tuning = ["--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "50"] if self.trial.tuned else []
        argv = [program, "--min_replicas", "1", "--bind", f"[::]:{self.port}", *tuning]
        lighthouse = self.lab.start("node0", argv, {})
        self.lab.nodes[LIGHTHOUSE] = lighthouse
        lighthouse.log = lighthouse.log.rename(lighthouse.log.with_name("lighthouse.log"))
        super().start_all()

    def argv(self, name: str) -> list[str]:
        """See ``System``."""
        launcher = [self.python, "-m", "torch.distributed.run", "--standalone", "--local-addr", self.lab.address(name)]
        return [*launcher, "--nproc-per-node", "1", "--max-restarts", "10", *self.work]

    def env(self, name: str) -> dict[str, str]:
        """See ``System``."""
        tuned = {"BENCH_TUNED": "1"} if self.trial.tuned else {}
        return {
            "TORCHFT_LIGHTHOUSE": f"http://{self.lab.address('node0')}:{self.port}",
            "BENCH_INDEX": name.removeprefix("node"),
            "BENCH_ADDRESS": self.lab.address(name),
            **tuned,
        }
