"""What the coordinator makes of the agents' reports: whom it blames, once, and what it does when nobody is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_core import KEYS, running, seat

from tmrun.core import codec, coordinator, hang
from tmrun.core.decision import Timers
from tmrun.core.membership import Job, Stored
from tmrun.core.model import Doubt, End, Eviction, Evidence, Head, Host, Kind, Leader, Migration, Resume, Sign, Stall, Term, Vote
from tmrun.core.watchdog import Blame


def stalled(job: Job, operations: tuple[int, ...], evidence: Evidence = Evidence.LATE, since_s: float = 700.0) -> Job:
    """Every seated node reports; rank r entered ``operations[r]`` collectives of step 9."""
    assert job.map is not None and job.spec is not None
    stalls = {}
    for slot, held in enumerate(job.map.seats):
        signs = tuple(Sign(r, "STEP", 9, operations[r], evidence, since_s) for r in job.spec.ranks(slot))
        stalls[held.host] = Stall(held.host, held.incarnation, job.epoch, signs)
    return replace(job, stalls=stalls)


def ordered(job: Job) -> list[Eviction]:
    decision = coordinator.decide(job, coordinator.observe(Timers(), job, 0.0), 0.0)
    puts = [op for op in (decision.txn.ops if decision.txn else ()) if hasattr(op, "value") and "eviction" in op.key]
    return [codec.decode(Eviction, op.value) for op in puts]


def uniform(job: Job) -> tuple[int, ...]:
    assert job.spec is not None
    return (3,) * job.spec.world


@pytest.fixture
def job() -> Job:
    return running((KEYS.leader, Leader(Host("a"), seat("a").incarnation, 1)), (KEYS.term, Term(1)))


def test_the_one_behind_is_ordered_out_once(job: Job) -> None:
    assert job.map is not None
    stuck = stalled(job, (*uniform(job)[:-1], 1))
    (order,) = ordered(stuck)
    assert (order.host, order.act) == (job.map.seats[-1].host, True)
    assert "entered 1 of its collectives, others 3" in order.text
    assert ordered(replace(stuck, evictions={order.host: order})) == []
    early = stalled(job, (*uniform(job)[:-1], 1), since_s=70.0)
    (told,) = ordered(early)
    assert not told.act, "first it is only told"
    assert ordered(replace(early, evictions={told.host: told})) == []
    assert ordered(replace(stuck, evictions={told.host: told})) == [order]
    frozen = stalled(job, uniform(job))
    last = frozen.stalls[order.host]
    stopped = replace(last, signs=(*last.signs[:-1], replace(last.signs[-1], evidence=Evidence.STOPPED, since_s=2.1)))
    assert ordered(replace(frozen, stalls={**frozen.stalls, order.host: stopped}))[0].act, "a frozen one is not waited for"
    assert ordered(replace(stuck, spec=replace(stuck.spec, hang_action="notify")))[0].act is False  # type: ignore[type-var]


def left(job: Job, slots: tuple[int, ...], step: int) -> Job:
    """The workers of these slots have left the loop after ``step`` and live on."""
    assert job.map is not None and job.spec is not None
    stalls = dict(job.stalls)
    for slot in slots:
        held = job.map.seats[slot]
        signs = tuple(Sign(r, "DONE", step, 3, Evidence.LEFT, 0.0) for r in job.spec.ranks(slot))
        stalls[held.host] = Stall(held.host, held.incarnation, job.epoch, signs)
    return replace(job, stalls=stalls)


def ends(job: Job, waited_s: float = 0.0) -> tuple[int, str] | None:
    decision = coordinator.decide(job, coordinator.observe(Timers(), job, 0.0), waited_s)
    puts = [op for op in (decision.txn.ops if decision.txn else ()) if getattr(op, "key", "") == KEYS.end]
    return next(((e.exit_code, e.reason) for e in (codec.decode(End, op.value) for op in puts)), None)


def test_a_loop_left_alone_ends_the_job_and_only_then(job: Job) -> None:
    assert job.map is not None and job.spec is not None
    may_restart = stalled(job, uniform(job))
    stuck = replace(may_restart, spec=replace(job.spec, max_restarts=0))
    last = len(job.map.seats) - 1
    assert ends(left(may_restart, (last,), 8)) is None, "as often as --max-restarts allows: it is the program's own error"
    code, why = ends(left(stuck, (last,), 8)) or (0, "")
    assert (code, "left the loop after step 8" in why, "the same number of steps" in why) == (1, True, True)
    assert ends(left(stuck, (last,), 9)) is None, "it has done all that the others are in"
    everywhere = left(job, tuple(range(last + 1)), 9)
    assert (ends(everywhere), hang.finding(everywhere)) == (None, None), "all of them save, perhaps"
    told = replace(stuck, spec=replace(job.spec, hang_action="notify"))
    assert ends(left(told, (last,), 8)) is None


def test_who_lost_a_connection_to_a_loop_that_is_over_is_told_so(job: Job) -> None:
    assert job.map is not None
    first = job.map.seats[0]
    doubt = Doubt(first.host, first.incarnation, job.epoch, "a worker lost a connection in step 9 (closed)")
    assert job.spec is not None
    job = replace(job, doubts={first.host: doubt}, spec=replace(job.spec, max_restarts=0))
    waiting = left(job, (1,), 8)
    assert ends(waiting) is None, "these may end, too"
    code, why = ends(waiting, 3600.0) or (0, "")
    assert (code, "left the loop while others train" in why) == (1, True)


def test_who_does_not_stop_for_a_failure_keeps_all_others_waiting(job: Job) -> None:
    """All others have voted; it waits for nobody, so it gets no more time than it takes to be late."""
    assert job.map is not None and job.spec is not None and job.head is not None
    stuck = stalled(job, (*uniform(job)[:-1], 1), since_s=61.0)
    last = job.map.seats[-1].host
    signs = stuck.stalls[last].signs
    beside = tuple(replace(s, evidence=Evidence.NONE, place="PARKED") for s in signs[:-1])
    alone = {last: replace(stuck.stalls[last], signs=(*beside, signs[-1]))}
    current = Migration(1, job.epoch, 1, Kind.FAILURE, (), job.map.generation)
    votes = {s.host: Stored(Vote(s.host, s.incarnation, 1, True), "v", 5, 5) for s in job.map.seats[:-1]}
    opened = replace(
        stuck, stalls=alone, migration=Stored(current, "m", 5, 5), votes=votes, head=replace(job.head, value=Head(job.epoch, 1, 1))
    )
    timers = Timers({"migration 1": -60.0})
    decision = coordinator.decide(opened, timers, 0.0)
    assert decision.txn is not None
    assert "all others have stopped" in decision.reason
    assert not ordered(opened), "the report is older than the migration, which may heal it"
    assert hang.unstopped(replace(opened, votes={}), 60.0) is None, "not all have"


def test_reports_of_an_older_epoch_or_life_are_ignored(job: Job) -> None:
    stuck = stalled(job, (*uniform(job)[:-1], 1))
    old = {h: replace(s, epoch=s.epoch - 1) for h, s in stuck.stalls.items()}
    assert hang.finding(replace(stuck, stalls=old)) is None


def test_everybody_at_the_same_place_is_connected_anew_and_then_it_is_the_program(job: Job) -> None:
    stuck = stalled(job, uniform(job))
    found = hang.finding(stuck)
    assert found is not None and found.blame is Blame.NOBODY
    timers = coordinator.observe(Timers(), stuck, 0.0)
    assert "waiting 599 s more" in coordinator.decide(stuck, timers, 1.0).reason
    decision = coordinator.decide(stuck, coordinator.observe(timers, stuck, 1000.0), 1000.0)
    assert decision.txn is not None and decision.txn.name.startswith("propose failure")
    assert stuck.map is not None and stuck.spec is not None
    again = replace(stuck, map=replace(stuck.map, kind=Kind.FAILURE, resume=Resume(9)), spec=replace(stuck.spec, max_restarts=0))
    end = coordinator.decide(again, coordinator.observe(timers, again, 1000.0), 1000.0)
    assert end.txn is not None and end.txn.name == "end job: failed"
    assert "all" in end.reason and "again" in end.reason
