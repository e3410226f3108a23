"""After a loss that no replica covers, the newest snapshot that is complete decides where everybody goes on."""

from __future__ import annotations

import pytest

from tmrun.core import codec, planner
from tmrun.core.model import Resume, WorkerVote


def vote(rank: int, *, covers: tuple[int, ...] = (), **snapshots: tuple[int, ...]) -> WorkerVote:
    return WorkerVote(rank, 9, 9, covers, {int(step.removeprefix("s")): ranks for step, ranks in snapshots.items()}, {8: covers})


def test_a_replica_is_preferred() -> None:
    workers = [vote(0, covers=(1,), s8=(0, 1)), vote(2, s8=(2, 0))]
    assert planner.resume([1], workers) == Resume(9, {1: 0}, {1: 0})


def test_a_replica_without_a_witness_is_not_enough() -> None:
    """Its tensors are here, its random state is not."""
    workers = [WorkerVote(0, 9, 9, (1,), {8: (0, 1)}), vote(2, s8=(2, 0))]
    assert planner.resume([1], workers) == Resume(8, {1: 0}, {1: 0}, rollback=True)


def test_the_newest_complete_one() -> None:
    workers = [vote(0, s4=(0, 2), s8=(0, 2)), vote(2, s4=(2, 1), s8=(2, 1))]
    assert planner.resume([1], workers) == Resume(8, {1: 2}, {1: 2}, rollback=True)


def test_not_yet_at_the_partner() -> None:
    workers = [vote(0, s4=(0, 2), s8=(0,)), vote(2, s4=(2, 1), s8=(2,))]
    assert planner.resume([1], workers) == Resume(4, {1: 2}, {1: 2}, rollback=True)


def test_a_stayer_without_its_own_copy() -> None:
    """It joined after that snapshot: nobody can go back to it."""
    assert planner.resume([1], [vote(0, s4=(0, 2)), vote(2, s4=(1,))]) is None


def test_one_of_two_lost_ranks_has_no_keeper() -> None:
    workers = [vote(0, s4=(0, 3)), vote(1, s4=(1, 0))]
    assert planner.resume([2, 3], workers) is None
    assert planner.resume([3], workers) == Resume(4, {3: 0}, {3: 0}, rollback=True)


def test_a_covered_rank_goes_back_with_the_others() -> None:
    """One lost rank has a replica, the other only a copy: the copy's step is everybody's, so both come from copies."""
    workers = [vote(0, covers=(2,), s4=(0, 3)), vote(1, s4=(1, 2))]
    assert planner.resume([2, 3], workers) == Resume(4, {2: 1, 3: 0}, {2: 1, 3: 0}, rollback=True)


@pytest.mark.parametrize("workers", [[vote(0)], [vote(0), vote(1, s4=(1, 2))]])
def test_no_snapshot_at_all(workers: list[WorkerVote]) -> None:
    assert planner.resume([2], workers) is None


def test_it_travels() -> None:
    sent = vote(0, s4=(0, 2), s8=())
    assert codec.decode(WorkerVote, codec.encode(sent)) == sent
