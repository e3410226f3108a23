"""Batches from a loader, in jobs that move: of committed steps no item is skipped and none drawn twice, and nobody else's is drawn."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import DEADLINE_S, Cluster
from nursery import Nursery
from trials import STEP, STEPS, Trials, read_losses

SCRIPT = Path(__file__).with_name("loaders.py")
ITEMS, ROWS = 28, 4
CASES = [
    *(("workers", event) for event in ("drain", "backward", "after_vote", "copy")),
    ("distributed", "backward"),
    ("distributed", "drain"),
    ("stateful", "drain"),
    ("stateful", "after_vote"),
]


@pytest.fixture(scope="module")
def all_jobs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(nursery, tmp_path_factory.mktemp, SCRIPT)


@pytest.fixture
def jobs(all_jobs: Trials) -> Iterator[Trials]:
    yield all_jobs
    while all_jobs.made:
        all_jobs.made.pop().close()


@pytest.mark.parametrize(("loader", "event"), CASES)
def test_the_batches_of_an_undisturbed_run(jobs: Trials, loader: str, event: str) -> None:
    """``copy``: nobody has a replica, and all go back by more batches than are kept for a redo."""
    if loader == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader")
    if event == "drain":
        jobs.drain("ddp", 1, TEST_LOADER=loader)
    elif event == "copy":
        assert jobs.kill("fsdp2", 1, "backward", TEST_LOADER=loader, TMRUN_SNAPSHOT_EVERY="5") <= STEP
    else:
        assert jobs.kill("ddp", 1, event, TEST_LOADER=loader) == STEP + (event == "after_vote")
    (job,) = jobs.made
    check_epochs(job, shared_by=2 if loader == "distributed" else 1)
    check_workers(job, have_some=loader != "distributed")


def check_epochs(job: Cluster, shared_by: int) -> None:
    """Rank 0, which saw every step."""
    logged = read_losses(job.losses, 0)
    assert sorted(logged) == list(range(STEPS))
    drawn = [[int(index) for index in logged[step].split("/")[0].split(",")] for step in range(STEPS)]
    an_epoch = -(-ITEMS // shared_by // ROWS)
    for first in range(0, STEPS, an_epoch):
        epoch = [index for batch in drawn[first : first + an_epoch] for index in batch]
        assert len(set(epoch)) == len(epoch), (first, epoch)
        assert first + an_epoch > STEPS or len(epoch) == ITEMS // shared_by, (first, epoch)


def check_workers(job: Cluster, have_some: bool) -> None:
    """Those of ranks that died, left, came and stayed end with them."""
    folder = job.losses / "workers"
    assert {int(p.name.split("-")[0]) for p in folder.iterdir()} == ({p.pid for p in job.processes} if have_some else set())
    deadline = time.monotonic() + DEADLINE_S
    while alive := [p.name for p in folder.iterdir() if is_locked(p)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def is_locked(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
