"""Who joins for whom, when nodes say where they are and what they have done before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from test_core import KEYS, member, seat, snapshot

from tmrun.core import coordinator, planner, policy
from tmrun.core.decision import Timers
from tmrun.core.membership import Job, Stored
from tmrun.core.model import (
    Admin,
    Cause,
    Head,
    Host,
    Incarnation,
    Incident,
    Kind,
    Leader,
    Member,
    Operation,
    RankMap,
    Resume,
    Run,
    Seat,
    Spec,
    Term,
    Trouble,
    Verb,
)

PLACES = {"a": "r1", "b": "r1", "c": "r2", "s1": "r1", "s2": "r2", "s3": "r3"}


def racked(host: str) -> Member:
    return member(host, warm=host.startswith("s"), labels={"rack": PLACES[host]})


def job(*maps: RankMap, hosts: tuple[str, ...] = ("a", "b", "c", "s1", "s2", "s3")) -> Job:
    seats = (seat("a"), seat("b"), seat("c"))
    first = RankMap(1, Kind.INITIAL, seats, 1, places=tuple(f"rack={PLACES[s.host]}" for s in seats))
    all_maps = (first, *(replace(m, seats=seats, places=first.places) for m in maps))
    records: dict[str, object] = {KEYS.spec: Spec(3, 1, 3, ("train.py",)), KEYS.head: Head(len(all_maps))}
    records |= {KEYS.map(m.epoch): m for m in all_maps} | {KEYS.member(h): racked(h) for h in hosts}
    return snapshot(records)


def joiners(current: Job, *slots: int, resting: tuple[str, ...] = ()) -> dict[int, str]:
    return {m.slot: m.joiner.host for m in planner.plan_moves(current, slots, resting=[Host(h) for h in resting]).moves}


def failed(epoch: int, host: str) -> RankMap:
    return RankMap(epoch, Kind.FAILURE, (), 1, resume=Resume(10 * epoch), incidents=(Incident(Host(host), -1, Cause.LOST),))


def test_a_joiner_is_near_its_leaver() -> None:
    assert joiners(job(), 0) == {0: "s1"}
    assert joiners(job(), 2) == {2: "s2"}


def test_a_rack_whose_nodes_all_failed_is_left_in_one_migration() -> None:
    moves = joiners(job(hosts=("c", "s1", "s2", "s3")), 0, 1)
    assert moves.keys() == {0, 1}
    assert "s1" not in moves.values()


def test_the_suspect_rack_is_better_than_none() -> None:
    assert joiners(job(hosts=("c", "s1", "s2")), 0, 1) == {0: "s2", 1: "s1"}


def test_who_failed_often_is_chosen_last_and_a_lemon_rests() -> None:
    past = [failed(e, "s1") for e in range(2, 2 + policy.LEMON)]
    current = job(*past)
    assert joiners(current, 0) == {0: "s2"}
    assert policy.lemons(current.maps)[Host("s1")] > 0
    only = job(*past, hosts=("b", "c", "s1"))
    assert joiners(only, 0) == {0: "s1"}
    plan = planner.plan_moves(only, [0], resting=[Host("s1")])
    assert (plan.short, "s1 failed 3 times in a row and cools down" in plan.why) == ((0,), True)


def test_a_drain_waits_for_a_lemon_to_cool_down_unless_it_has_a_deadline_or_names_it() -> None:
    past = [failed(e, "s1") for e in range(2, 2 + policy.LEMON)]
    current = job(*past, hosts=("a", "b", "c", "s1"))
    runs = {i: Stored(Run(i, s.host, s.incarnation, 4, (1,), True), KEYS.run(i), 1, 1) for i, s in enumerate(current.maps[0].seats)}
    term = Stored(Term(1), KEYS.term, 1, 1)
    current = replace(current, runs=runs, term=term, leader=Stored(Leader(*_names("a"), 1), KEYS.leader, 1, 1))

    def decided(**more: Any) -> str:
        op = Operation("d-1", Verb.DRAIN, (Host("b"),), **more)
        asked = replace(current, ops={op.id: op}, admins={Host("b"): Admin(Host("b"), True, op=op.id)})
        timers = coordinator.observe(Timers(), asked, 0.0)
        decision = coordinator.decide(asked, timers, 0.0)
        return decision.txn.name if decision.txn and not decision.txn.name.startswith("tell") else decision.reason

    assert "s1 failed 3 times in a row and cools down" in decided()
    assert decided(to="s1") == "propose drain migration 1"
    assert decided(force_after_s=60.0) == "propose drain migration 1"


def _names(host: str) -> tuple[Host, Incarnation]:
    return seat(host).host, seat(host).incarnation


def test_a_restart_leaves_a_lemon_out_while_there_are_others() -> None:
    died = Trouble(1, *_names("b"), 1, 1, 137, "killed", software=False)
    whole, few = (replace(job(hosts=hosts), troubles={1: died}) for hosts in (("a", "b", "c", "s1", "s2", "s3"), ("a", "b", "s1")))
    assert [s.host for s in planner.restart_seats(whole, {Host("b")})] == ["a", "s1", "c"]
    assert [s.host for s in planner.restart_seats(replace(whole, troubles={}), {Host("b")})] == ["a", "b", "c"], "it runs its slot well"
    assert [s.host for s in planner.restart_seats(few, {Host("b")})] == ["a", "b", "s1"], "better than none"


def test_the_first_map_leaves_spares_in_different_racks() -> None:
    fresh = snapshot({KEYS.spec: Spec(3, 1, 3, ("train.py",)), **{KEYS.member(h): racked(h) for h in PLACES}})
    seats: tuple[Seat, ...] = planner.first_seats(fresh)
    spare = PLACES.keys() - {s.host for s in seats}
    assert {PLACES[h] for h in spare} == {"r1", "r2", "r3"}
    assert [PLACES[s.host] for s in seats] == sorted(PLACES[s.host] for s in seats)
