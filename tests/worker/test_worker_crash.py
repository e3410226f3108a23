"""Processes die; the step in flight happens everywhere or nowhere, bit for bit."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from cluster import Cluster
from test_worker_groups import MODES
from trials import STEP as LATER
from trials import Trials

from tmrun import wire
from tmrun.worker.groups import ENV_SWITCH

Make = Callable[..., Cluster]
Same = Callable[..., None]
STEP = 6
REDONE = ("forward", "backward", "before_vote")
COUNTED = ("after_vote", "in_optimizer")


@pytest.mark.parametrize("point", [*REDONE, *COUNTED])
@pytest.mark.parametrize("world", [2, 4])
def test_killed(cluster: Make, same: Same, world: int, point: str) -> None:
    job = cluster(world, fresh=world == 2 and point in ("backward", "after_vote"), TMRUN_TEST_KILL=f"1:{STEP}:{point}")
    joiner = job.standby(1)
    job.start(at_once=True)
    before = {r: w.pid for r, w in job.ranks.items()}
    job.died(1)
    target = job.heal({1: joiner})
    assert target == STEP + (point in COUNTED)
    assert {r: w.pid for r, w in job.ranks.items()} == {**before, 1: joiner.pid}
    same(job, unlogged=((1, STEP),))


@pytest.mark.parametrize("loser", [0, 2])
def test_the_vote_is_lost_by_one_survivor(cluster: Make, same: Same, loser: int) -> None:
    """It commits late, even if it is the source of the joiner's state."""
    job = cluster(3, TMRUN_TEST_KILL=f"1:{STEP}:after_vote,{loser}:{STEP}:lose_vote")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == STEP + 1
    votes = {r: job.expect(job.ranks[r], wire.Prepared) for r in (0, 2)}
    assert votes[loser].next_step == STEP
    same(job, unlogged=((1, STEP),))


@pytest.mark.parametrize("switch", MODES)
@pytest.mark.parametrize("loses_vote", [False, True])
def test_half_of_the_update_is_done(cluster: Make, same: Same, switch: str, loses_vote: bool) -> None:
    """The victim dies with half of its parameters updated; one survivor is told of it when it has done half itself, another one has done
    all, or none, because it had lost the vote. All end with the whole update."""
    loser = f"2:{STEP}:lose_vote" if loses_vote else ""
    job = cluster(3, TMRUN_TEST_HALFWAY=f"1:{STEP}:die,0:{STEP}:told", TMRUN_TEST_KILL=loser, **{ENV_SWITCH: switch})
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == STEP + 1
    same(job, unlogged=((1, STEP),))
    assert_halfway(job)


def test_half_of_the_update_is_done_without_a_replica(trials: Trials) -> None:
    """Everybody goes back to a snapshot, from the middle of an update too."""
    job = trials.make("fsdp2", TMRUN_TEST_HALFWAY=f"1:{LATER}:die,0:{LATER}:told", TMRUN_SNAPSHOT_EVERY="3")
    joiner = job.standby(1)
    job.start()
    job.died(1)
    assert job.heal({1: joiner}) <= LATER
    trials.same(job)
    assert_halfway(job)


@pytest.mark.parametrize("mode", ["fsdp2", "tp", "pp"])
def test_in_a_forward_that_communicates(trials: Trials, mode: str) -> None:
    """Before the second block, while its peer gathers, reduces or receives; in a pipeline with the next micro batches under way."""
    assert trials.kill(mode, 1, "forward", TMRUN_SNAPSHOT_EVERY="3") <= LATER


def assert_halfway(job: Cluster) -> None:
    found = {rank: re.search(f"rank {rank} has updated ([0-9]+) of ([0-9]+) parameters", job.output()) for rank in (0, 1)}
    assert all(0 < int(each[1]) < int(each[2]) for each in found.values() if each) and None not in found.values()


def test_the_vote_is_lost_and_the_rest_of_the_step_communicates(cluster: Make, same: Same) -> None:
    job = cluster(3, TMRUN_TEST_KILL=f"1:{STEP}:after_vote,0:{STEP}:lose_vote", TEST_TAIL="1")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == STEP + 1
    same(job, unlogged=((1, STEP),))


def test_a_collective_after_the_vote_fails(cluster: Make, same: Same) -> None:
    """The block still runs to its end: the scheduler's step is not lost."""
    job = cluster(2, TMRUN_TEST_KILL=f"1:{STEP}:in_optimizer", TEST_TAIL="1")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == STEP + 1
    same(job, unlogged=((1, STEP),))


@pytest.mark.parametrize("what", ["all_reduce", "functional", "object", "new_group", "save"])
def test_communication_between_steps(cluster: Make, what: str) -> None:
    """A successor could not take part in it: the script ends, and is told what to change."""
    job = cluster(2, TMRUN_TEST_KILL=f"1:{STEP}:between", TEST_BETWEEN=what)
    job.start(at_once=True)
    job.died(1)
    if what == "new_group":  # it waits in the store, where a death is not seen
        job.ranks[0].channel.send(wire.Prepare(1, wire.Kind.FAILURE, 2, (1,), 0, 1))
    assert job.ranks[0].process.wait(60) == 1, job.output()
    assert "move this communication into the `with step:` block" in job.output()


def test_two_at_once(cluster: Make, same: Same) -> None:
    """Each gets its state from both survivors, in parts."""
    job = cluster(4, TMRUN_TEST_KILL=f"1:{STEP}:backward,2:{STEP}:backward", TMRUN_TEST_PART="16384")
    joiners = {1: job.standby(1), 2: job.standby(2)}
    job.start(at_once=True)
    for rank in joiners:
        job.died(rank)
    assert job.heal(joiners) == STEP
    assert all(job.expect(job.ranks[r], wire.Switched, epoch=2).bytes > 10_000 for r in (0, 3))
    assert job.expect(joiners[1], wire.Receiving).done > 0
    same(job)


def test_one_after_the_other(cluster: Make, same: Same) -> None:
    """The second one dies in the first step after the switch."""
    job = cluster(2, TMRUN_TEST_KILL=f"1:{STEP}:forward,0:{STEP + 3}:before_vote")
    joiners = {1: job.standby(1), 0: job.standby(0)}
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiners[1]}) == STEP
    job.died(0)
    assert job.heal({0: joiners[0]}) == STEP + 3
    same(job)


def test_drained_then_killed(cluster: Make, same: Same) -> None:
    job = cluster(2, TMRUN_TEST_KILL="0:14:backward", TEST_PACE_S="0.05")
    joiners = [job.standby(1), job.standby(0)]
    job.start()
    job.reach(3)
    assert job.drain(1, joiners[0]) < 14
    job.died(0)
    assert job.heal({0: joiners[1]}) == 14
    same(job)


def test_killed_while_a_drain_is_prepared(cluster: Make, same: Same) -> None:
    job = cluster(3, TMRUN_TEST_KILL=f"2:{STEP}:backward")
    joiners = [job.standby(1), job.standby(2)]
    job.start()
    job.reach(3)
    job.migration += 1
    for worker in job.ranks.values():  # its joiner never comes
        worker.channel.send(wire.Prepare(job.migration, wire.Kind.DRAIN, 2, (1,), worker.rank, 1))
    job.died(2)
    assert job.heal({2: joiners[1]}) == STEP
    same(job)


def test_the_joiner_dies_too(cluster: Make, same: Same) -> None:
    job = cluster(3, TMRUN_TEST_KILL=f"1:{STEP}:backward")
    useless, joiner = job.standby(1), job.standby(1)
    job.start(at_once=True)
    job.died(1)
    useless.process.kill()
    useless.process.wait()
    stayers = [job.ranks[0], job.ranks[2]]
    job.migration += 1
    for worker in stayers:
        worker.channel.send(wire.Prepare(job.migration, wire.Kind.FAILURE, 2, (1,), worker.rank, 1))
    job.abort(stayers)
    assert job.heal({1: joiner}) == STEP
    same(job)


def test_frozen(cluster: Make, same: Same) -> None:
    """Nobody gets an error from a frozen peer; the agent's word wakes them."""
    job = cluster(3)
    joiner = job.standby(1)
    job.start()
    job.reach(STEP)
    os.kill(job.ranks[1].pid, signal.SIGSTOP)
    target = job.heal({1: joiner})
    assert target >= STEP - 1
    same(job, unlogged=tuple((1, s) for s in range(target - 1, target + 1)))


def test_too_early(cluster: Make) -> None:
    job = cluster(2, TMRUN_TEST_KILL="1:0:backward")
    job.start(at_once=True)
    job.died(1)
    job.expect(job.ranks[0], wire.Joined)
    job.ranks[0].channel.send(wire.Prepare(1, wire.Kind.FAILURE, 2, (1,), 0, 1))
    assert "has done 0 steps" in job.expect(job.ranks[0], wire.Refused, migration=1).reason
