"""The committed map names the communicators that a worker goes on with. It uses nothing that it prepared under another name, or in vain."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from cluster import DEADLINE_S, Cluster, Worker
from trials import STEP, Trials, read_losses

from tmrun import wire
from tmrun.worker.build import CONTROL

WORLD = "0"
"""Torch's name of the default group."""


def another_id(comm: dict[str, str]) -> None:
    assert comm[WORLD] == f"m1/{WORLD}"
    comm[WORLD] = f"m7/{WORLD}"


def without_one(comm: dict[str, str]) -> None:
    del comm[CONTROL]


EDITS: dict[Callable[[dict[str, str]], None], str] = {
    another_id: f"group {WORLD} was prepared as m1/{WORLD}, but the committed map says m7/{WORLD}",
    without_one: f"group {CONTROL} was prepared as m1/{CONTROL}, but the committed map says None",
}


def commit_drain(job: Cluster, joiner: Worker) -> int:
    """Rank 1 is to go; the step from which its joiner was to go on."""
    job.start()
    job.reach(4)
    stop, commit = job.prepare_drain(1, joiner)
    commit()
    return stop


def commit_crash(job: Cluster, joiner: Worker) -> int:
    job.start()
    job.died(1)
    return job.conclude(job.prepare(wire.Kind.FAILURE, {1: joiner}), {1: joiner}, seat=False)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("commit", [commit_drain, commit_crash])
def test_nobody_goes_on_with_what_was_not_committed(
    trials: Trials, commit: Callable[[Cluster, Worker], int], edit: Callable[[dict[str, str]], None]
) -> None:
    job = trials.make("ddp", 2, **({"TMRUN_TEST_KILL": f"1:{STEP}:backward"} if commit is commit_crash else {}))
    joiner = job.standby(1)
    job.edit_map = edit
    step = commit(job, joiner)
    for worker in (job.ranks[0], joiner):
        assert worker.process.wait(DEADLINE_S) == 1, job.output()
        assert re.search(f"WorkerError: {re.escape(EDITS[edit])}", worker.log.read_text())
        assert not [m for m in worker.channel.messages if isinstance(m, wire.Switched)]
    assert all(max(read_losses(job.losses, rank)) < step for rank in (0, 1))
