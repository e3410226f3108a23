"""The mass-loss breaker: many silent losses at once are waited out for one lease time; nothing else is."""

from __future__ import annotations

from dataclasses import replace

from tmrun.core import attempts, conditions, coordinator, losses
from tmrun.core.decision import Timers
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, Stored
from tmrun.core.model import (
    Head,
    Host,
    Incarnation,
    Kind,
    Leader,
    Member,
    Migration,
    Move,
    Notice,
    Obituary,
    Phase,
    RankMap,
    Run,
    Seat,
    Spec,
    Term,
    Trouble,
)

KEYS = Keys("job")
TTL = 10
NODES = 40
"""10 % of them: 4."""


def _seat(i: int) -> Seat:
    return Seat(Host(f"n{i}"), Incarnation(f"life{i}"))


def _job(*gone: int, standbys: int = 10) -> Job:
    spec = Spec(NODES, 1, standbys, ("x",), lease_ttl_s=TTL)
    here = [i for i in range(NODES + standbys) if i not in gone]
    return Job(
        KEYS,
        spec=spec,
        term=Stored(Term(1), KEYS.term, 1, 1),
        leader=Stored(Leader(Host("n39"), Incarnation("life39"), 1), KEYS.leader, 1, 1),
        head=Stored(Head(1), KEYS.head, 2, 2),
        map=RankMap(1, Kind.INITIAL, tuple(map(_seat, range(NODES))), 1),
        members={
            _seat(i).host: Stored(Member(*_astuple(_seat(i)), "a", 1, "1", warm=i >= NODES), KEYS.member(f"n{i}"), 3, 3) for i in here
        },
        runs={i: Stored(Run(i, *_astuple(_seat(i)), 1, (1,), True), KEYS.run(i), 4, 4) for i in here if i < NODES},
    )


def _astuple(seat: Seat) -> tuple[Host, Incarnation]:
    return seat.host, seat.incarnation


class Clock:
    """Observe and decide, second by second."""

    def __init__(self) -> None:
        self.now, self.timers, self.reason = 100.0, Timers(), ""

    def at(self, seconds: float, job: Job) -> str:
        self.now = 100.0 + seconds
        self.timers = coordinator.observe(self.timers, job, self.now)
        decision = coordinator.decide(job, self.timers, self.now)
        self.reason = decision.reason
        if decision.txn is None or decision.txn.name.startswith("tell all"):
            return decision.reason
        return decision.txn.name


def test_all_claims_are_lost_with_the_leases() -> None:
    """The store was away, and a worker died meanwhile: nobody restarts before those who live could say so."""
    trouble = Trouble(0, Host("n0"), _seat(0).incarnation, 1, 0, 137, "killed", software=False)
    told = replace(_job(), runs={}, troubles={0: trouble}, notice=Notice(1, movable=True))
    assert "n1 is back" in Clock().at(0, told)
    assert Clock().at(0, replace(told, runs={1: _job().runs[1]})) == "propose failure migration 1"
    assert "restart" in Clock().at(0, replace(told, notice=None)), "no worker ever reached run.steps"


def test_a_small_loss_is_replaced_at_once() -> None:
    assert Clock().at(0, _job(0, 1, 2)) == "propose failure migration 1"


def test_a_mass_loss_is_waited_out_for_one_lease_time_and_no_longer() -> None:
    clock, job = Clock(), _job(0, 1, 2, 3)
    assert clock.at(0, job).startswith("4 of 40 nodes vanished at once: suspecting the store or the network")
    assert "replacing nobody for 1 s" in clock.at(9, job)
    assert clock.at(TTL, job) == "propose failure migration 1"
    assert [c["code"] for c in conditions.of(job)] == ["STORE_SUSPECT"]


def test_those_that_come_back_keep_their_slots() -> None:
    clock = Clock()
    clock.at(0, _job(0, 1, 2, 3))
    assert clock.at(2, _job(3)).startswith("1 of 40 nodes vanished")
    assert clock.at(3, _job()) == "steady"
    assert clock.at(4, _job(3)) == "propose failure migration 1", "a later single loss is nothing special"
    assert [(c["code"], c["grade"]) for c in conditions.of(_job(3))] == [("NODE_SUSPECT", "warn")]


def test_losses_that_go_on_do_not_extend_it() -> None:
    clock = Clock()
    for second in range(TTL):
        assert "suspecting" in clock.at(second, _job(*range(4 + second // 2)))
    assert clock.at(TTL, _job(*range(9))) == "propose failure migration 1"


def test_confirmed_deaths_do_not_count() -> None:
    job = _job(0, 1, 2, 3)
    buried = {_seat(i).host: Obituary(*_astuple(_seat(i))) for i in (0, 1)}
    assert Clock().at(0, replace(job, obituaries=buried)) == "propose failure migration 1"
    troubled = {i: Trouble(i, *_astuple(_seat(i)), 1, i, 137, "killed", software=False) for i in range(4)}
    job = _job()
    job = replace(job, troubles=troubled, runs={i: r for i, r in job.runs.items() if i > 3})
    assert Clock().at(0, job) == "propose failure migration 1"


def test_leases_that_run_out_one_by_one_do_not_use_up_the_attempts() -> None:
    """Every one of them aborts the migration that the one before began."""
    tried = tuple(_aborted(n, *range(n)) for n in range(1, 8))
    assert Clock().at(0, replace(_job(*range(3)), aborted=tried)) == "propose failure migration 1"
    again = tuple(_aborted(n, 0, 1, 2) for n in range(attempts.MAX_ABORTS))
    assert "presumed dead, restarting" in Clock().at(0, replace(_job(*range(3)), aborted=again))


def _aborted(number: int, *slots: int) -> Migration:
    moves = tuple(Move(i, _seat(i), _seat(NODES + i)) for i in slots)
    return Migration(number, 1, 1, Kind.FAILURE, moves, 1, Phase.ABORTED, reason="stayer is gone")


def test_losses_one_by_one_never_trip_it() -> None:
    clock = Clock()
    for count in range(1, 8):
        said = clock.at(count * TTL / 3, _job(*range(count), standbys=0))
        assert "suspecting" not in said, said
    assert losses.breaker_limit(Spec(2, 1, 0, ("x",))) == 3
