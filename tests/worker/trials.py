"""Jobs of ``matrix.py``, or of a script like it, in which something happens, compared with the same job in which nothing does."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from pathlib import Path

from cluster import ROOT, Cluster
from nursery import Nursery

SCRIPT = Path(__file__).with_name("matrix.py")
WORLD = {"ddp": 2, "ddp_static": 2, "ddp_views": 2, "flat": 2, "fsdp2": 2, "hsdp": 4, "tp": 2, "fsdp2_tp": 4, "pp": 2, "pp_dp": 4}
STEP = 9
STEPS = 16


class Trials:
    """Makes clusters whose processes are forked, and knows what each would have done alone."""

    def __init__(self, nursery: Nursery, directory: Callable[[str], Path], script: Path = SCRIPT) -> None:
        self._nursery, self._directory, self._script = nursery, directory, script
        self._uninterrupted = functools.cache(self._run_alone)
        self.made: list[Cluster] = []

    def make(self, mode: str, world: int = 0, **environment: str) -> Cluster:
        arguments = ["--steps", str(STEPS)]
        job = Cluster(self._directory(mode), world or WORLD[mode], arguments, {"TEST_MODE": mode, **environment}, self._script)
        job.nursery = self._nursery
        self.made.append(job)
        return job

    def drain(self, mode: str, rank: int, world: int = 0, **environment: str) -> None:
        job = self.make(mode, world, **environment)
        joiner = job.standby(rank)
        job.start()
        job.reach(4)
        job.drain(rank, joiner)
        self.same(job)

    def kill(self, mode: str, rank: int, point: str, world: int = 0, **environment: str) -> int:
        """The step at which it went on."""
        job = self.make(mode, world, TMRUN_TEST_KILL=f"{rank}:{STEP}:{point}", **environment)
        joiner = job.standby(rank)
        job.start()
        job.died(rank)
        target = job.heal({rank: joiner})
        self.same(job, unlogged=((rank, STEP),))
        return target

    def same(self, job: Cluster, unlogged: tuple[tuple[int, int], ...] = ()) -> None:
        """Losses, parameters after every step, and the final state. ``unlogged``: (rank, step) that died before it could write."""
        digest = job.finish()
        wanted = {k: v for k, v in job.environment.items() if k.startswith("TEST_")}
        losses, expected = self._uninterrupted(job.world, tuple(sorted(wanted.items())))
        for rank in range(job.world):
            got = read_losses(job.losses, rank)
            assert got == {s: x for s, x in losses[rank].items() if s in got or (rank, s) not in unlogged}, rank
        assert digest == expected

    def _run_alone(self, world: int, environment: tuple[tuple[str, str], ...]) -> tuple[list[dict[int, str]], str]:
        directory = self._directory("alone")
        digest = run_alone(self._nursery, self._script, directory, world, STEPS, dict(environment))
        return [read_losses(directory, rank) for rank in range(world)], digest


def run_alone(nursery: Nursery, script: Path, directory: Path, world: int, steps: int, environment: dict[str, str]) -> str:
    """As torchrun would start it; the final digest."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {
        **environment, "TEST_PACE_S": "0", "TEST_REFERENCE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
    }  # fmt: skip
    arguments = ["--steps", str(steps), "--log-losses", str(directory)]
    logs = [directory / f"{rank}.log" for rank in range(world)]
    children = [
        nursery.run(script, arguments, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log, directory)
        for rank, log in enumerate(logs)
    ]
    for child, log in zip(children, logs, strict=True):
        assert child.wait(120) == 0, log.read_text()
    return logs[0].read_text().split()[-1]


def read_losses(directory: Path, rank: int) -> dict[int, str]:
    """Every logged line, by step; a step logged twice must have been the same twice."""
    losses: dict[int, str] = {}
    for line in (directory / f"rank{rank}.txt").read_text().splitlines():
        step, loss = line.split()
        assert losses.setdefault(int(step), loss) == loss, (rank, line)
    return losses
