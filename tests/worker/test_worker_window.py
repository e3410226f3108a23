"""A rank is lost after a drain's commit and before its stop step: a failure migration takes the drain's place, bit for bit."""

from __future__ import annotations

import os
import signal

import pytest
from cluster import DEADLINE_S, Cluster, Worker
from test_worker_groups import MODES
from trials import Trials

from tmrun import wire
from tmrun.core.model import Resume

LEAVER, STAYER, OTHER = 1, 2, 0
BEGIN = 4
"""The drain's Prepare comes in this step; all are ready for its vote, so they stop before ``BEGIN + 2``."""
WINDOW = BEGIN + 1
"""The last step before that."""
LOST = 76


def kill(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.process.wait(DEADLINE_S) == -signal.SIGKILL


def commit_a_drain(job: Cluster, joiner: Worker, frozen: int | None = None) -> int:
    """Commit it while the job is in ``WINDOW``, which ``frozen`` does not finish."""
    job.start()
    job.reach(BEGIN)
    number = job.prepare(wire.Kind.DRAIN, {LEAVER: joiner})
    votes = [job.expect(w, wire.Prepared, migration=number) for w in job.ranks.values()]
    if frozen is not None:
        os.kill(job.ranks[frozen].pid, signal.SIGSTOP)
    job.expect(joiner, wire.Prepared, migration=number)
    assert {v.stop_step for v in votes} == {WINDOW + 1}, "getting ready took longer than a step"
    job._commit(number, Resume(WINDOW + 1), votes, [*job.ranks.values(), joiner])
    (job.losses / "fast").touch()
    return number


def gave_up(job: Cluster, *workers: Worker) -> None:
    for worker in workers:
        assert worker.process.wait(DEADLINE_S) == LOST, job.output()


def check(trials: Trials, job: Cluster) -> None:
    """``BEGIN``: whoever was frozen may not have logged that it happened."""
    trials.same(job, unlogged=((LEAVER, BEGIN), (STAYER, BEGIN)))


def test_the_leaver_dies(trials: Trials) -> None:
    job = trials.make("ddp", 3, TEST_PACE_S="1")
    drained, joiner = job.standby(LEAVER), job.standby(LEAVER)
    commit_a_drain(job, drained, frozen=LEAVER)
    kill(job.ranks[LEAVER])
    gave_up(job, drained)
    assert job.heal({LEAVER: joiner}) == WINDOW
    check(trials, job)


@pytest.mark.parametrize("how", ["dies", "is cut off"])
def test_a_stayer_is_lost(trials: Trials, how: str) -> None:
    """The leaver cannot get to its stop step: it finds out by an error, or is told. Both ranks move."""
    job = trials.make("ddp", 3, TEST_PACE_S="1")
    drained, *joiners = job.standby(LEAVER), job.standby(LEAVER), job.standby(STAYER)
    number = commit_a_drain(job, drained, frozen=STAYER)
    leaver, lost = job.ranks[LEAVER], job.ranks[STAYER]
    if how == "dies":
        kill(lost)
    else:
        leaver.channel.send(wire.Abort(number, "a rank was lost"))
    gave_up(job, leaver, drained)
    assert job.heal(dict(zip((LEAVER, STAYER), joiners, strict=True))) == WINDOW
    if how != "dies":
        kill(lost)
    check(trials, job)


def test_the_joiner_dies(trials: Trials) -> None:
    """The leaver's agent is told so and ends its workers."""
    job = trials.make("ddp", 3, TEST_PACE_S="1")
    drained, joiner = job.standby(LEAVER), job.standby(LEAVER)
    commit_a_drain(job, drained, frozen=STAYER)
    kill(drained)
    kill(job.ranks[LEAVER])
    os.kill(job.ranks[STAYER].pid, signal.SIGCONT)
    assert job.heal({LEAVER: joiner}) == WINDOW
    check(trials, job)


@pytest.mark.parametrize("switch", MODES)
def test_some_have_switched_and_some_have_not(trials: Trials, switch: str) -> None:
    """A stayer does not hear that the last vote before the stop step passed. The others do, the leaver hands over, another is lost."""
    job = trials.make("ddp", 3, TEST_PACE_S="1", TMRUN_TEST_KILL=f"{OTHER}:{WINDOW}:lose_vote", TMRUN_SWITCH=switch)
    drained, joiner = job.standby(LEAVER), job.standby(STAYER)
    commit_a_drain(job, drained)
    for worker in (job.ranks[STAYER], drained):
        job.expect(worker, wire.Switched, epoch=job.epoch)
    assert job.ranks[LEAVER].process.wait(DEADLINE_S) == 0, job.output()
    job.ranks[LEAVER] = drained
    kill(job.ranks[STAYER])
    assert job.heal({STAYER: joiner}) == WINDOW + 1
    said = {r: job.expect(job.ranks[r], wire.Prepared, migration=job.migration).step for r in (OTHER, LEAVER)}
    assert said == {OTHER: WINDOW, LEAVER: WINDOW + 1}
    check(trials, job)
