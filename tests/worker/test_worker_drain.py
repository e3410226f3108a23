"""Machines leave on purpose; training goes on bit for bit, in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from cluster import STEPS, Cluster

from tmrun import wire

Make = Callable[..., Cluster]
Same = Callable[..., None]


@pytest.mark.parametrize(("world", "rank"), [(2, 1), (2, 0), (4, 2)])
def test_drain(cluster: Make, same: Same, world: int, rank: int) -> None:
    job = cluster(world, fresh=(world, rank) == (2, 1))
    joiner = job.standby(rank)
    job.start()
    before = {r: w.pid for r, w in job.ranks.items()}
    job.reach(4)
    stop = job.drain(rank, joiner)
    assert 4 <= stop <= STEPS
    after = {r: w.pid for r, w in job.ranks.items()}
    assert after == {**before, rank: joiner.pid}
    same(job)
    for worker in job.ranks.values():
        assert job.expect(worker, wire.Resumed, epoch=2).step == stop


@pytest.mark.parametrize(
    ("on_role", "why"),
    [
        ("given", ""),
        ("forgets", "on_role left batches.rank, rank at 0"),
        ("sampler", "on_role left data.loader.sampler.rank at 0"),
        ("world", "_joined['group'] is the default process group, which becomes another one"),
    ],
)
def test_a_standby_takes_another_rank_than_it_rehearsed(cluster: Make, same: Same, on_role: str, why: str) -> None:
    """In place if the script says how; else, and when something still says the old rank afterwards, the script starts again."""
    job = cluster(2, TEST_PACE_S="0.1", TEST_ON_ROLE=on_role)
    joiner = job.standby(0)
    job.start()
    job.reach(3)
    job.drain(1, joiner)
    assert [m.rank for m in joiner.channel.messages if isinstance(m, wire.Warm)] == ([0, 1] if why else [0])
    assert f"not taken in place: {why}; the script starts again" in job.rehearsal() if why else "in place" not in job.rehearsal()
    same(job)


def test_every_rank_is_replaced_one_after_the_other(cluster: Make, same: Same) -> None:
    """In live steps only there is one more collective: each joiner tells that its first one met a kind that was not rehearsed."""
    job = cluster(2, TEST_PACE_S="0.05", TEST_EXTRA="1")
    joiners = {rank: job.standby(rank) for rank in (0, 1)}
    job.start()
    job.reach(3)
    first = job.drain(0, joiners[0])
    second = job.drain(1, joiners[1])
    assert first < second
    same(job)
    for epoch, joiner, stayer in ((2, joiners[0], joiners[1]), (3, joiners[1], joiners[0])):
        assert job.expect(joiner, wire.Resumed, epoch=epoch).cold["collective all_reduce"] == 1
        assert epoch == 2 or job.expect(stayer, wire.Resumed, epoch=epoch).cold == {}


def test_at_the_very_end(cluster: Make, same: Same) -> None:
    job = cluster(2, TEST_PACE_S="0.1")
    joiner = job.standby(0)
    job.start()
    job.reach(STEPS - 2)
    assert job.drain(0, joiner) == STEPS
    same(job)


def test_aborted_then_drained(cluster: Make, same: Same) -> None:
    job = cluster(2, TEST_PACE_S="0.05")
    joiner = job.standby(1)
    job.start()
    job.reach(3)
    number = job.prepare(wire.Kind.DRAIN, {1: joiner})
    for worker in [*job.ranks.values(), joiner]:
        job.expect(worker, wire.Prepared, migration=number)
    job.abort([*job.ranks.values(), joiner])
    job.drain(1, joiner)
    same(job)


def test_aborted_while_the_others_wait_for_the_joiner(cluster: Make, same: Same) -> None:
    job = cluster(2, TEST_PACE_S="0.05")
    joiner = job.standby(1)
    job.start()
    job.reach(3)
    job.migration += 1
    for worker in job.ranks.values():  # the joiner never hears of it
        worker.channel.send(wire.Prepare(job.migration, wire.Kind.DRAIN, 2, (1,), worker.rank, 1))
    time.sleep(0.2)
    job.abort(list(job.ranks.values()))
    job.drain(1, joiner)
    same(job)


def test_before_the_loop_it_is_refused(cluster: Make) -> None:
    job = cluster(2, fresh=True)  # a forked one would soon be in the loop
    job.start()
    channel = job.ranks[0].channel
    channel.send(wire.Prepare(1, wire.Kind.DRAIN, 2, (1,), 0, 1))
    assert "starting" in job.expect(job.ranks[0], wire.Refused, migration=1).reason
    job.finish()


def test_a_standby_that_is_not_needed_has_printed_nothing(cluster: Make) -> None:
    job = cluster(2)
    joiner = job.standby(0)
    job.expect(joiner, wire.Warm)
    joiner.process.kill()
    joiner.process.wait(30)
    assert "step" not in joiner.log.read_text(), "rehearsed output belongs into the rehearsal log"
