"""What a failure means: causes, giving up, lemons."""

from __future__ import annotations

import pytest

from tmrun.core import policy
from tmrun.core.model import Cause, Host, Incarnation, Incident, Kind, RankMap, Resume, Seat, Trouble
from tmrun.core.policy import Action, cause_of

SEATS = (Seat(Host("a"), Incarnation("1")), Seat(Host("b"), Incarnation("1")))


def failure(epoch: int, host: str, target: int, cause: Cause = Cause.CRASH, rank: int = 3, kind: Kind = Kind.FAILURE) -> RankMap:
    return RankMap(epoch, kind, SEATS, 1, resume=Resume(target), incidents=(Incident(Host(host), rank, cause),))


def trouble(host: str, step: int, cause: Cause = Cause.CRASH, rank: int = 3) -> Trouble:
    return Trouble(1, Host(host), Incarnation("1"), 9, rank, 139, "killed by SIGSEGV", False, False, cause, step)


@pytest.mark.parametrize(
    ("code", "memory", "cause"),
    [
        (1, False, Cause.PROGRAM),
        (3, True, Cause.PROGRAM),
        (134, False, Cause.CRASH),
        (139, False, Cause.CRASH),
        (137, False, Cause.KILLED),
        (137, True, Cause.MEMORY),
        (143, True, Cause.KILLED),
        (76, False, Cause.KILLED),
        (74, False, Cause.DISK),
    ],
)
def test_causes(code: int, memory: bool, cause: Cause) -> None:
    assert cause_of(code, out_of_memory=memory) is cause
    assert cause_of(code, hung=True) is Cause.HANG


def test_the_same_death_on_several_hosts_follows_the_rank() -> None:
    past = [failure(2, "a", 50), failure(3, "b", 50)]
    verdict = policy.judge(past, [trouble("c", 50)])
    assert verdict.action is Action.GIVE_UP
    assert "3 times on a, b, c, always at step 50" in verdict.why


@pytest.mark.parametrize(
    ("past", "now"),
    [
        ([failure(2, "a", 50)], trouble("b", 50)),  # once may be the machine
        ([failure(2, "a", 50), failure(3, "b", 50)], trouble("c", 900)),  # there was progress
        ([failure(2, "a", 50), failure(3, "b", 90)], trouble("c", 90)),
        ([failure(2, "a", 50), failure(3, "a", 50)], trouble("a", 50)),  # always the same machine: that may be it
        ([failure(2, "a", 50, rank=1), failure(3, "b", 50, rank=2)], trouble("c", 50)),  # different ranks
        ([failure(2, "a", 50, Cause.HANG), failure(3, "b", 50)], trouble("c", 50)),  # different causes
        ([failure(2, "a", 50, Cause.KILLED), failure(3, "b", 50, Cause.KILLED)], trouble("c", 50, Cause.KILLED)),  # somebody's hand
    ],
)
def test_otherwise_the_ranks_move(past: list[RankMap], now: Trouble) -> None:
    assert policy.judge(past, [now]).action is Action.MOVE


def test_a_drain_between_changes_nothing_a_restart_does() -> None:
    drain, restart = (RankMap(e, k, SEATS, 1, resume=Resume(50)) for e, k in ((3, Kind.DRAIN), (3, Kind.RESTART)))
    past = [failure(2, "a", 50), drain, failure(4, "b", 50)]
    assert policy.judge(past, [trouble("c", 50)]).action is Action.GIVE_UP
    assert policy.judge([past[0], restart, past[2]], [trouble("c", 50)]).action is Action.MOVE


def test_failures_without_progress_have_a_budget_that_progress_resets() -> None:
    past = [failure(e, "ab"[e % 2], 50, Cause.LOST, -1) for e in range(policy.MAX_FUTILE)]
    assert policy.judge(past[1:], []).action is Action.MOVE
    assert policy.judge(past, []).action is Action.GIVE_UP
    assert policy.judge([*past, failure(99, "a", 60, Cause.LOST, -1)], []).action is Action.MOVE


def test_a_rank_that_dies_the_same_way_before_and_after_a_restart() -> None:
    past = [RankMap(1, Kind.INITIAL, SEATS, 1), failure(2, "b", 0, Cause.MEMORY, kind=Kind.RESTART)]
    other = failure(3, "a", 0, Cause.LOST, -1, kind=Kind.RESTART)
    assert policy.repeated(past, 3, Cause.MEMORY)
    assert policy.repeated([*past, other], 3, Cause.MEMORY)
    assert not policy.repeated(past, 3, Cause.KILLED)
    assert not policy.repeated(past, 2, Cause.MEMORY)
    assert not policy.repeated([*past, failure(3, "a", 10)], 3, Cause.MEMORY), "the job trained"
    assert not policy.repeated([*past, other], -1, Cause.LOST)
    assert not policy.repeated([*past, failure(3, "a", 0, Cause.LOST, kind=Kind.RESTART)], 3, Cause.LOST), "its machine went away"


def test_a_killed_agent_comes_back_ever_later() -> None:
    assert [policy.restart_delay([5.0] * n) for n in (1, 2, 3, 50)] == [1, 2, 4, policy.MAX_RESTART_DELAY_S]
    assert policy.restart_delay([5.0, 5.0, 5000.0]) == 1


def test_a_lemon_is_remembered_and_cools_down() -> None:
    past = [failure(2, "b", 10), *(failure(e, "a", 100 * e, Cause.LOST, -1) for e in (3, 4))]
    assert (policy.lemons(past), policy.strikes(past, Host("a"))) == ({}, 2)
    past.append(failure(5, "a", 500, Cause.LOST, -1))
    first = policy.lemons(past)[Host("a")]
    past.append(failure(6, "a", 600, Cause.LOST, -1))
    assert 0 < first < policy.lemons(past)[Host("a")] <= policy.MAX_COOL_DOWN_S
    past.append(failure(7, "b", 700))
    assert policy.lemons(past) == {}, "others fail too"
    assert policy.strikes(past, Host("a")) == 4
