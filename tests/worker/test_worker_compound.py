"""A second failure while the first is being healed, or during a drain's transfer: another migration heals it, bit for bit."""

from __future__ import annotations

import os
import signal

import pytest
from cluster import DEADLINE_S, Cluster, Worker
from trials import STEP, Trials

from tmrun import wire
from tmrun.worker.groups import ENV_SWITCH
from tmrun.worker.shim import load


def freeze(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGSTOP)


def kill(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.process.wait(DEADLINE_S) == -signal.SIGKILL


def prepared(job: Cluster, joiners: dict[int, Worker]) -> int:
    """A failure migration for which everybody is ready."""
    number = job.prepare(wire.Kind.FAILURE, joiners)
    for worker in [*(w for r, w in job.ranks.items() if r not in joiners), *joiners.values()]:
        job.expect(worker, wire.Prepared, migration=number)
    return number


def freezes_as_it_receives(job: Cluster, joiner: Worker) -> None:
    """It is given rank 1, and stands still in the middle of its state."""
    job.conclude(prepared(job, {1: joiner}), {1: joiner}, seat=False)
    job.expect(joiner, wire.Receiving)
    freeze(joiner)


@pytest.mark.parametrize("point", ["backward", "after_vote"])
def test_the_joiner_dies_while_it_receives(trials: Trials, point: str) -> None:
    job = trials.make("ddp", 3, TMRUN_TEST_KILL=f"1:{STEP}:{point}")
    useless, joiner = job.standby(1), job.standby(1)
    job.start()
    job.died(1)
    number = prepared(job, {1: useless})
    freeze(useless)
    job.conclude(number, {1: useless}, seat=False)
    kill(useless)
    assert job.heal({1: joiner}) == STEP + (point == "after_vote")
    trials.same(job, unlogged=((1, STEP),))


def test_what_the_joiner_receives_is_damaged(trials: Trials) -> None:
    """It goes, as if whoever sent it had gone: nobody takes that for an error of the script's."""
    job = trials.make("ddp", 2, TMRUN_TEST_KILL=f"1:{STEP}:backward")
    useless, joiner = job.standby(1, TEST_DAMAGE="1"), job.standby(1)
    job.start()
    job.died(1)
    job.conclude(prepared(job, {1: useless}), {1: useless}, seat=False)
    assert useless.process.wait(DEADLINE_S) == 76, job.output()
    assert "could not receive its state: the state from rank 0 arrived damaged" in useless.log.read_text()
    assert job.heal({1: joiner}) == STEP
    trials.same(job, unlogged=((1, STEP),))


@pytest.mark.skipif(load() is None, reason="the C++ switch is not built")
def test_a_send_is_half_done_when_the_joiner_dies(trials: Trials) -> None:
    """gloo may lose the error of such a send; its sender goes on all the same."""
    job = trials.make("ddp", 2, TMRUN_TEST_KILL=f"1:{STEP}:backward", TEST_WIDTH="512", **{ENV_SWITCH: "shim"})
    useless, joiner = job.standby(1), job.standby(1)
    job.start()
    job.died(1)
    freezes_as_it_receives(job, useless)
    kill(useless)
    assert job.heal({1: joiner}) == STEP
    trials.same(job, unlogged=((1, STEP),))


@pytest.mark.skipif(load() is None, reason="the C++ switch is not built")
def test_the_joiner_freezes_while_its_state_comes_from_a_device(trials: Trials) -> None:
    """Nothing of such a transfer is counted by a switch, and nothing tells its source that the other side stands still: it is let go all
    the same, and answers while that side is still there."""
    more = {ENV_SWITCH: "shim", "STAND_IN": "cpu:nccl", "TMRUN_TEST_PART": str(1 << 20)}
    job = trials.make("ddp", 2, TMRUN_TEST_KILL=f"1:{STEP}:backward", TEST_WIDTH="512", **more)
    useless, joiner = job.standby(1), job.standby(1)
    job.start()
    job.died(1)
    freezes_as_it_receives(job, useless)
    assert job.heal({1: joiner}) == STEP
    kill(useless)
    trials.same(job, unlogged=((1, STEP),))


def test_the_source_dies_while_it_sends(trials: Trials) -> None:
    """The joiner is of no use then: two ranks are lost."""
    job = trials.make("ddp", 3, TMRUN_TEST_KILL=f"1:{STEP}:backward")
    useless, *joiners = job.standby(1), job.standby(0), job.standby(1)
    job.start()
    job.died(1)
    number = prepared(job, {1: useless})
    freeze(job.ranks[0])
    job.conclude(number, {1: useless}, seat=False)
    kill(job.ranks[0])
    assert useless.process.wait(DEADLINE_S) == 76, job.output()
    job.heal(dict(enumerate(joiners)))
    trials.same(job, unlogged=((1, STEP), (0, STEP)))


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("point", ["backward", "after_vote"])
def test_one_of_two_joiners_dies_while_it_receives(trials: Trials, point: str, dies: int) -> None:
    """The other one is fed all the same, and stays when the next one comes."""
    job = trials.make("ddp", 3, TMRUN_TEST_KILL=f"1:{STEP}:{point}")
    joiners, spare = {rank: job.standby(rank) for rank in (0, 1)}, job.standby(dies)
    job.start()
    job.died(1)
    kill(job.ranks[0])
    number = prepared(job, joiners)
    freeze(joiners[dies])
    target = job.conclude(number, joiners, seat=False)
    kill(joiners[dies])
    lives = joiners[1 - dies]
    job.expect(lives, wire.Switched, epoch=job.epoch)
    job.ranks[1 - dies] = lives
    assert job.heal({dies: spare}) == target
    trials.same(job, unlogged=((1, STEP), (0, STEP)))


def start_drain(job: Cluster, joiner: Worker) -> int:
    """Rank 1 is to go, all have stopped for it, and it freezes before it can hand over."""
    job.start()
    job.reach(4)
    stop, commit = job.prepare_drain(1, joiner)
    job.expect(job.ranks[1], wire.Progress, step=stop)  # it waits there
    freeze(job.ranks[1])
    commit()
    for rank in (0, 2):
        job.expect(job.ranks[rank], wire.Switched, epoch=job.epoch)
    return stop


def test_another_rank_dies_during_a_drains_transfer(trials: Trials) -> None:
    job = trials.make("ddp", 3)
    drained, joiner = job.standby(1), job.standby(2)
    stop = start_drain(job, drained)
    leaver, job.ranks[1] = job.ranks[1], drained
    kill(job.ranks[2])
    number = job.prepare(wire.Kind.FAILURE, {2: joiner})
    job.expect(job.ranks[0], wire.Prepared, migration=number)
    os.kill(leaver.pid, signal.SIGCONT)
    assert leaver.process.wait(DEADLINE_S) == 0, job.output()
    assert job.conclude(number, {2: joiner}) == stop
    trials.same(job)


def test_the_leaver_dies_during_its_transfer(trials: Trials) -> None:
    job = trials.make("ddp", 3)
    drained, joiner = job.standby(1), job.standby(1)
    stop = start_drain(job, drained)
    kill(job.ranks[1])
    assert drained.process.wait(DEADLINE_S) == 76, job.output()
    assert job.heal({1: joiner}) == stop
    trials.same(job)


def test_the_leaver_hangs_in_its_transfer(trials: Trials) -> None:
    """Nobody is told of it: it is no rank any more. The joiner gives up by itself, and is replaced from a replica."""
    job = trials.make("ddp", 3, TMRUN_TEST_STALL_S="0.3")
    drained, joiner = job.standby(1), job.standby(1)
    stop = start_drain(job, drained)
    assert drained.process.wait(DEADLINE_S) == 76, job.output()
    kill(job.ranks[1])
    assert job.heal({1: joiner}) == stop
    trials.same(job)
