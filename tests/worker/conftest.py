from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import SCRIPT, STEPS, Cluster
from nursery import Nursery
from trials import Trials, run_alone


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run under torchrun."""

    digest: str
    losses: dict[int, dict[int, str]]


@dataclass(frozen=True)
class Undisturbed:
    """A run without tmrun: the final digest, and the folder of its logs."""

    digest: str
    logs: Path


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Path], Reference]:
    @functools.cache
    def run(world: int, script: Path) -> Reference:
        directory = tmp_path_factory.mktemp(f"reference{world}")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_PACE_S": "0"}
        command = [*torchrun, str(script), "--steps", str(STEPS), "--log-losses", str(directory)]
        for _ in range(3):  # a process of torch's own may abort at its very end: "terminate called without an active exception"
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stderr
        (digest,) = set(re.findall(r"[0-9a-f]{64}", done.stdout))  # every rank may print it, and on one line
        return Reference(digest, {r: read_losses(directory, r) for r in range(world)})

    return run


@pytest.fixture
def cluster(tmp_path: Path, nursery: Nursery) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters of forked processes; ``fresh``: of processes that import everything themselves, and have a hash seed of their own."""
    made: list[Cluster] = []

    def make(world: int, script: Path = SCRIPT, *, fresh: bool = False, **environment: str) -> Cluster:
        made.append(Cluster(tmp_path, world, ["--steps", str(STEPS)], environment, script))
        made[-1].nursery = None if fresh else nursery
        return made[-1]

    yield make
    for each in made:
        each.close()


def read_losses(directory: Path, rank: int) -> dict[int, str]:
    """Every logged loss, bit for bit; a step logged twice must have been the same twice."""
    losses: dict[int, str] = {}
    for line in (directory / f"rank{rank}.txt").read_text().splitlines():
        step, loss = line.split()
        assert losses.setdefault(int(step), loss) == loss, (rank, line)
    return losses


@pytest.fixture
def same(reference: Callable[[int, Path], Reference]) -> Callable[..., None]:
    """Finish a cluster and compare it with the uninterrupted run. ``unlogged``: (rank, step) whose process died before it could write."""

    def check(cluster: Cluster, unlogged: tuple[tuple[int, int], ...] = ()) -> None:
        digest = cluster.finish()
        expected = reference(cluster.world, cluster.script)
        for rank in range(cluster.world):
            got = read_losses(cluster.losses, rank)
            wanted = {s: x for s, x in expected.losses[rank].items() if s in got or (rank, s) not in unlogged}
            assert got == wanted, rank
        assert digest == expected.digest

    return check


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, int, int], Undisturbed]:
    """Runs a script (of so many ranks and steps) as nothing disturbs it, once a session."""

    @functools.cache
    def run(script: Path, world: int, steps: int) -> Undisturbed:
        directory = tmp_path_factory.mktemp("undisturbed")
        return Undisturbed(run_alone(nursery, script, directory, world, steps, {"TEST_DIE": str(directory)}), directory)

    return run


@pytest.fixture(scope="session")
def all_trials(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(nursery, tmp_path_factory.mktemp)


@pytest.fixture
def trials(all_trials: Trials) -> Iterator[Trials]:
    yield all_trials
    while all_trials.made:
        all_trials.made.pop().close()
