"""NVRx's in-process restart: one plain process a host, as srun would start them, with a reserve rank; node0 holds the store."""

from __future__ import annotations

from bench.compare.systems.base import System


class InProcess(System):
    """All ranks, the reserve too, are there from the beginning."""

    venv = "nvrx"
    script = "inprocess.py"

    def argv(self, name: str) -> list[str]:
        """See ``System``."""
        return [self.python, *self.work]

    def env(self, name: str) -> dict[str, str]:
        """See ``System``."""
        tuned = {"BENCH_TUNED": "1"} if self.trial.tuned else {}
        return {
            "RANK": name.removeprefix("node"),
            "WORLD_SIZE": str(self.trial.nodes + 1),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": self.lab.address("node0"),
            "MASTER_PORT": str(self.port),
            "BENCH_ACTIVE": str(self.trial.nodes),
            **tuned,
        }

    def start_all(self) -> None:
        """With the reserve."""
        super().start_all()
        self.start(self.spare_name)

    def start_spare(self) -> None:
        """It runs already."""
