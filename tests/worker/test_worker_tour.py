"""A standby rehearses the roles that there are, beside its own rank's."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from cluster import DEADLINE_S, Cluster, Worker
from trials import Trials

from tmrun import wire
from tmrun.worker.board import Board, Pending
from tmrun.worker.identity import Identity
from tmrun.worker.tour import Tour, candidates

SLOW = {"TEST_PACE_S": "0.3", "TMRUN_RECORD_WAIT_S": "60", "LOCAL_WORLD_SIZE": "1"}


def stages(trials: Trials, **more: str) -> Cluster:
    """A pipeline whose stages differ; a standby can be back from all of them before it ends."""
    return trials.make("pp", TEST_UNEVEN="1", **SLOW, **more)


def warm(job: Cluster, standby: Worker, times: int) -> wire.Warm:
    """What it says when it is warm for the so-manieth time."""

    def told() -> list[wire.Warm]:
        return [m for m in standby.channel.messages if isinstance(m, wire.Warm)]

    try:
        job.agent.wait(lambda: len(told()) >= times, DEADLINE_S, f"warm {times} times")
    except AssertionError:
        raise AssertionError(f"{told()}\n{job.rehearsal()}\n{job.output()}") from None
    return told()[times - 1]


def hurry(job: Cluster) -> None:
    (job.losses / "fast").touch()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_role_once(trials: Trials, rank: int) -> None:
    """It ends as what it was given, and takes either rank."""
    job = stages(trials)
    joiner = job.standby(1)
    job.start(at_once=True)
    assert (warm(job, joiner, 1).rehearsal.also, warm(job, joiner, 2).rehearsal.also) == ((), (0,))
    assert warm(job, joiner, 2).rank == 1
    hurry(job)
    job.drain(rank, joiner)
    trials.same(job)


def test_ranks_that_are_alike_are_one_role(trials: Trials) -> None:
    job = trials.make("ddp", **{**SLOW, "TEST_PACE_S": "0.1"})
    joiner = job.standby(1)
    job.start(at_once=True)
    job.reach(12)
    job.drain(0, joiner)
    trials.same(job)
    told = [m.rehearsal for m in joiner.channel.messages if isinstance(m, wire.Warm)]
    assert [(each.rank, each.also) for each in told] == [(1, ()), (0, (1,))], "its own, and the one that it was needed as"


def test_called_in_the_middle(trials: Trials) -> None:
    """A rehearsal of another rank, which here would never end, is given up."""
    job = stages(trials, TEST_AS_0="linger")
    joiner = job.standby(1)
    job.start(at_once=True)
    warm(job, joiner, 1)
    job.reach(3)
    job.drain(1, joiner)
    hurry(job)
    trials.same(job)


@pytest.mark.parametrize("how", ["fail", "leave"])
def test_a_role_in_which_the_script_ends(trials: Trials, how: str) -> None:
    job = stages(trials, TEST_AS_0=how)
    joiner = job.standby(1)
    job.start(at_once=True)
    assert warm(job, joiner, 2).rehearsal.also == ()
    hurry(job)
    job.drain(1, joiner)
    trials.same(job)


# -- which role is next -------------------------------------------------------------------------------------------------------------
class Roles:
    """A store that knows some ranks' roles."""

    def __init__(self, roles: dict[int, str]) -> None:
        self.kept = {f"record/5/of/{rank}": f"name {role}".encode() for rank, role in roles.items()}
        self.away = False

    def check(self, keys: list[str]) -> bool:
        if self.away:
            raise dist.DistStoreError("no quorum")
        return set(keys) <= self.kept.keys()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def dispose(self) -> None:
        pass


def place(rank: int, world: int = 8, local_world: int = 2) -> Identity:
    return Identity("", True, rank, rank % local_world, world, local_world, 0, 5, "")


def following(store: Roles, home: int, longest_s: float = 1.0) -> list[int | None]:
    """The ranks that are rehearsed, one after the other."""
    tour, found, board = Tour(home, lambda: store), [home], Board()  # type: ignore[arg-type, return-value]
    while True:
        tour.rehearsed(found[-1], longest_s)
        rank = tour.next(board, place(found[-1]))
        if rank is None or len(found) > 5:
            return [*found]
        found.append(rank)


THREE = {0: "first", 2: "middle", 4: "middle", 6: "last", 1: "first'", 3: "middle'", 5: "middle'", 7: "last'"}


def test_first_middle_and_last_slot_at_the_own_place() -> None:
    assert candidates(place(5)) == [1, 5, 7]
    assert candidates(place(0, world=2, local_world=2)) == [0]
    assert candidates(place(3, world=1024, local_world=8)) == [3, 515, 1019]


@pytest.mark.parametrize(
    ("roles", "home", "passes"),
    [
        (THREE, 6, [6, 0, 4, 6]),
        (THREE, 2, [2, 0, 6, 2]),  # its own role is that of the middle
        (THREE, 7, [7, 1, 5, 7]),
        (dict.fromkeys(range(8), "same"), 6, [6]),
        ({6: "last"}, 6, [6]),  # of the others nothing is known
        ({0: "first", 4: "middle"}, 6, [6]),  # perhaps the own role is among them
        ({}, 6, [6]),
    ],
)
def test_passes(roles: dict[int, str], home: int, passes: list[int]) -> None:
    assert following(Roles(roles), home) == passes


def test_a_long_pass_is_not_made_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who calls meanwhile would have to wait for it."""
    monkeypatch.setenv(wire.ENV_RECORD_WAIT, "100")
    assert following(Roles(THREE), 6, longest_s=24.0) == [6, 0, 4, 6]
    assert following(Roles(THREE), 6, longest_s=26.0) == [6]


def test_without_a_store_it_stays() -> None:
    store = Roles(THREE)
    store.away = True
    assert following(store, 6) == [6]


def posted(rank: int) -> Board:
    board = Board()
    board.post(Pending(wire.Prepare(1, wire.Kind.DRAIN, 2, (rank,), rank, 5), 0.0))
    return board


def test_a_call_is_for_another_rank_and_for_who_is_known_to_be_warm() -> None:
    tour = Tour(6, lambda: Roles(THREE))  # type: ignore[arg-type, return-value]
    assert tour.called(posted(2), 6) is None
    tour.told = True
    assert (tour.called(posted(6), 6), tour.called(Board(), 6), tour.home) == (None, None, 6)
    assert (tour.called(posted(2), 6), tour.home) == (2, 2)


def test_when_a_pass_ends_whoever_calls_decides() -> None:
    """However long it was."""
    tour = Tour(6, lambda: Roles(THREE))  # type: ignore[arg-type, return-value]
    for seconds in (1.0, 1000.0):
        tour.rehearsed(0, seconds)
        assert tour.next(posted(0), place(0)) is None and not tour.away


def test_with_other_roles_unwanted_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.ENV_ROLES, "0")
    assert following(Roles(THREE), 6) == [6]


@pytest.mark.parametrize("answer", ["none", "swallow", "park", "call", "abort"])
def test_who_does_not_come_when_called_ends(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """The job takes another standby then, instead of waiting."""
    ended: list[str] = []
    monkeypatch.setattr("tmrun.worker.tour.fence", ended.append)
    monkeypatch.setenv(wire.ENV_RECORD_WAIT, "0.4")
    tour, board = Tour(6, lambda: Roles(THREE)), posted(2)  # type: ignore[arg-type, return-value]
    pending = board.newest
    assert pending is not None
    before = threading.active_count()
    tour.begin(0)
    tour.expect(pending, 0)  # it is not known to be warm yet: nobody counts on it
    tour.told = True
    for asked_for in (6, 2):
        tour.begin(asked_for)
        tour.expect(pending, asked_for)  # its own rank, or the one that it is called for: this is waited for
        if asked_for == 2:
            tour.begin(6)
    assert threading.active_count() == before
    tour.begin(0)
    tour.expect(pending, 0)
    assert threading.active_count() == before + 1
    if answer == "park":
        tour.rehearsed(0, 1.0)
    elif answer == "call":
        assert tour.called(board, 0) == 2
        tour.begin(2)
    elif answer == "swallow":
        assert tour.called(board, 0) == 2  # and the script catches what is raised
    elif answer == "abort":
        board.decide(wire.Abort(1, "off"))
    end = time.monotonic() + DEADLINE_S
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    told = "it is needed as rank 2, and for 0.1 s has not come back from rehearsing another role"
    assert ended == ([told] if answer in ("none", "swallow") else [])


def test_the_way_back() -> None:
    tour = Tour(6, lambda: Roles(THREE))  # type: ignore[arg-type, return-value]
    assert tour.way_back(6) is None
    tour.told = True
    assert (tour.way_back(0), tour.way_back(6)) == (6, None)
    assert tour.next(Board(), place(6)) == 4, "not again as rank 0"
