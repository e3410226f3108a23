"""What the elected coordinator does next: one transaction at most, and why.

    no map          -> enough hosts? start epoch 1
    open migration  -> judge it (``migration``)
    a hang          -> name who keeps the others waiting, order its node to end its workers (``hang``); the rest is a failure
    a slot failed   -> the program's own error: end (or restart within the budget); many nodes vanished at once: wait one lease time for
                       them to come back (the breaker); a lost machine: move the slot to a standby,
                       restart everybody when moving is impossible, wait when no standby is warm
    ... and paused  -> say what is held back, do nothing
    ... no more     -> workers that an aborted migration has parked go on: a migration without moves
    a drain is open -> move the host's slots; finish the request when its processes are confirmed gone
    all slots done  -> end

``decide`` is pure and level-triggered: it may be repeated by anybody at any time. The only memory is ``Timers``, durations on the
coordinator's own clock, and losing it costs time, never safety. May not know: stores, threads, who executes the transaction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tmrun.core import hang, planner, policy, transactions, watchdog
from tmrun.core import migration as judging
from tmrun.core.membership import Job
from tmrun.core.model import (
    FENCED_SHARE,
    UNSEEN_SHARE,
    End,
    Host,
    JobState,
    Kind,
    Migration,
    Notice,
    Operation,
    OpState,
    RankMap,
    Seat,
    Spec,
    Trouble,
    Verb,
)
from tmrun.core.ranklist import ranks_text
from tmrun.core.txn import Txn

MAX_ABORTS = 5
"""So many attempts in a row to move the same slots may be aborted before the workers are restarted instead."""
BREAKER_SHARE = 0.1
"""Of the nodes: a loss of so many at once is not believed at once."""
DOUBT_SHARE = 1.5
"""A lost connection that no death has explained for so many lease times is a broken link."""
MACHINE_RESTARTS = 10
"""Restarts of the whole job that lost machines may cost; ``--max-restarts`` bounds those that the program itself causes."""


@dataclass(frozen=True, slots=True)
class Timers:
    """When this coordinator first saw something, by its own monotonic clock."""

    seen: Mapping[str, float] = field(default_factory=dict)

    def since(self, what: str, now: float) -> float:
        """Seconds since ``what`` began, 0 if it has not."""
        return now - self.seen.get(what, now)


@dataclass(frozen=True, slots=True)
class Decision:
    """``say`` is the line for the operator once the transaction has succeeded (empty: not worth one)."""

    txn: Txn | None
    reason: str
    say: str = ""


def observe(timers: Timers, job: Job, now: float) -> Timers:
    """Start and stop the timers that ``decide`` asks for."""
    going = set()
    if job.spec and job.map is None and len(job.members) >= job.spec.nnodes:
        going.add("enough")
    if job.open_migration:
        going.add(f"migration {job.open_migration.id}")
        if any(v.value.workers for v in job.votes.values()):
            going.add(f"parked {job.open_migration.id}")
    going |= {f"left {h} {x.incarnation}" for h, x in job.leaving.items() if not job.alive(Seat(h, x.incarnation))}
    if job.map:
        going |= {f"gone {i} {s.incarnation}" for i, s in enumerate(job.map.seats) if not job.alive(s)}
        if _mass_loss(job, timers, now):
            going.add("suspect")
        going.add(f"taking over {job.epoch}")
        if any(_echoes(job, i) for i in range(len(job.map.seats))):
            going.add(f"echo {job.epoch}")
        if any(d.epoch == job.epoch for d in job.doubts.values()):
            going.add(f"doubt {job.epoch}")
        stuck = hang.finding(job)
        if stuck is not None and stuck.blame is watchdog.Blame.NOBODY:
            going.add(f"deadlock {job.epoch}")
        if _failed(job) and not planner.standbys(job) and not job.pause:
            going.add("no standby")
    going |= {f"rests {h} {policy.strikes(job.maps, h)}" for h in job.members if policy.lemon(job.maps, h)}
    going |= {f"request {op.id}" for op in job.open_ops() if op.force_after_s}
    return Timers({what: timers.seen.get(what, now) for what in going})


def decide(job: Job, timers: Timers, now: float) -> Decision:
    """The coordinator's next transaction. ``job.leader`` is me; ``now`` in seconds of the clock of ``observe``."""
    decision = _decide(job, timers, now)
    return decision if decision.txn is not None else _tell(job, decision)


def _tell(job: Job, decision: Decision) -> Decision:
    """Nothing else to do: let the agents know what changed for them. While a migration is open nobody needs to."""
    if job.map is None or job.end is not None or job.open_migration is not None:
        return decision
    failed = tuple(_failed(job))
    notice = Notice(job.map.generation, job.movable, bool(job.done), job.epoch if failed else 0, failed)
    if notice == job.told:
        return decision
    return Decision(transactions.tell(job, notice), decision.reason)


def _decide(job: Job, timers: Timers, now: float) -> Decision:
    if job.spec is None or job.end is not None:
        return Decision(None, "the job has ended" if job.end else "no job yet")
    if job.map is None:
        return _rendezvous(job, job.spec, timers, now)
    late = _overdue(job, timers, now)
    if late is not None:
        return Decision(transactions.force(job, late), f"drain {late.id} is overdue", f"drain {late.id} is overdue: {_FORCED}")
    stuck = _hang(job)
    if stuck is not None:
        return stuck
    if job.open_migration:
        return _migrate(job, timers, now)
    for rule in (_all_done, _failures, _resync, _drains):
        decision = rule(job, job.spec, job.map, timers, now)
        if decision is not None:
            return decision
    return Decision(None, "steady")


def _rendezvous(job: Job, spec: Spec, timers: Timers, now: float) -> Decision:
    seats = planner.first_seats(job)
    missing = _missing(job, spec, timers, now)
    if missing:
        return Decision(None, missing)
    txn = transactions.start(job, seats, Kind.INITIAL, "launch")
    return Decision(txn, "enough nodes", "epoch 1: " + _seats_text(job.spec, seats))


def _missing(job: Job, spec: Spec, timers: Timers, now: float) -> str:
    """Who is waited for before the first start; empty: nobody."""
    here = len(planner.first_seats(job))
    if here < spec.nnodes:
        return f"waiting for nodes: {here} of {spec.nnodes} are here"
    waited = timers.since("enough", now)
    if len(job.members) < spec.nnodes + spec.standby and waited < spec.join_wait_s:
        return f"waiting {spec.join_wait_s - waited:.0f} s more for standbys"
    return ""


def _seats_text(spec: Spec | None, seats: tuple[Seat, ...]) -> str:
    assert spec is not None
    return ", ".join(f"{s.host} ranks {ranks_text(spec.ranks(i))}" for i, s in enumerate(seats))


def _migrate(job: Job, timers: Timers, now: float) -> Decision:
    current = job.open_migration
    assert current is not None and job.spec is not None
    verdict = judging.judge(job, current, timers.since(f"migration {current.id}", now))
    if isinstance(verdict, judging.Wait):
        return Decision(None, verdict.reason)
    if isinstance(verdict, judging.Abort):
        return Decision(transactions.abort(job, verdict.reason), verdict.reason, f"migration {current.id} aborted: {verdict.reason}")
    doubt = [m.slot for m in current.moves if current.kind is Kind.FAILURE and not _confirmed(job, m.slot)]
    if doubt and idle_s(job) + timers.since(f"parked {current.id}", now) < job.spec.lease_ttl_s * FENCED_SHARE:
        return Decision(None, f"{_what(job, doubt[0])}: presumed dead; its agent, if it lives, is ending workers that were cut off")
    txn = transactions.commit(job, verdict.resume)
    kept = job.spec.nnodes - len(current.moves)
    say = f"committed epoch {job.epoch + 1} at step {verdict.resume.target}; stayers kept: {kept} nodes, {kept * job.spec.nproc} processes"
    return Decision(txn, "all votes are in", say)


def idle_s(job: Job) -> float:
    """For how long some stayer had entered no vote when it answered."""
    return max((w.idle_s for v in job.votes.values() for w in v.value.workers), default=0.0)


def _hang(job: Job) -> Decision | None:
    """Some ranks keep all others waiting: their nodes have to end them, whatever else goes on. What then follows is a failure's."""
    found = hang.finding(job)
    orders = hang.orders(job, found) if found is not None and not job.pause else ()
    if found is None or not orders:
        return None
    hosts = ", ".join(f"{o.host} rank {o.rank}" for o in orders)
    acts = "its workers are ended" if all(o.act for o in orders) else "nothing is done yet"
    return Decision(transactions.evict(job, orders), found.why, f"hang: {found.why}; {hosts} is to blame: {acts}")


def _all_done(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    if len(job.done) < len(current.seats):
        return None
    return _end(job, JobState.SUCCEEDED, 0, "all workers finished")


def _end(job: Job, state: JobState, code: int, reason: str) -> Decision:
    return Decision(transactions.end_job(job, End(state, code, reason), as_leader=True), reason, f"job {state.value}: {reason}")


def _failed(job: Job) -> list[int]:
    assert job.map is not None
    return [i for i, s in enumerate(job.map.seats) if i not in job.done and (job.trouble(i) or not job.alive(s))]


def _failures(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    failed = _failed(job)
    if not failed:
        return None
    if job.done:
        return _end(job, JobState.FAILED, _exit_code(job, failed), f"{_what(job, failed[0])} after others had finished")
    if job.pause:
        return Decision(None, f"{_what(job, failed[0])}; {held_back(job)}")
    failed.sort(key=lambda i: _echoes(job, i))  # the cause is told first
    blamed = _blame_program(job, spec, failed, timers, now)
    if blamed is not None:
        return blamed
    frozen = _frozen(job, timers, now)
    if frozen:
        return Decision(None, frozen)
    held = [i for i in failed if i in job.runs]
    if held:
        return Decision(None, f"slot {held[0]} is still claimed by {job.runs[held[0]].value.host}")
    if _immovable(job):
        return _restart_after_loss(job, current, failed, f"{_what(job, failed[0])}; {_immovable(job)}", timers, now)
    verdict = policy.judge(job.maps, [t for t in map(job.trouble, failed) if t is not None])
    if verdict.action is policy.Action.GIVE_UP:
        return _restart(job, verdict.why, _exit_code(job, failed), program=True)
    late = _taking_over(job, current, failed)
    if late and timers.since(f"taking over {current.epoch}", now) < spec.prepare_deadline_s:
        return Decision(None, f"{_what(job, failed[0])}; {late}")
    return _replace(job, spec, current, failed, timers, now)


def _blame_program(job: Job, spec: Spec, failed: list[int], timers: Timers, now: float) -> Decision | None:
    """Some program failed by itself. Those that only lost a peer wait for what happened to it, and are to blame if nothing did."""
    software = [job.troubles[i] for i in failed if job.trouble(i) and job.troubles[i].software]
    own = [t for t in software if not t.echo]
    if own:
        return _program_error(job, spec, own[0])
    if len(software) < len(failed):
        return None
    left = DOUBT_SHARE * spec.lease_ttl_s - timers.since(f"echo {job.epoch}", now)
    if left > 0:
        return Decision(None, f"{_what(job, failed[0])}; waiting {left:.0f} s more for what happened to its peer")
    return _program_error(job, spec, software[0])


def _echoes(job: Job, slot: int) -> bool:
    """Its workers ended because they lost a peer: whatever else failed is the cause."""
    trouble = job.trouble(slot)
    return trouble is not None and trouble.echo


def held_back(job: Job) -> str:
    """What a pause means, for people; empty when there is none."""
    if job.pause is None:
        return ""
    return f"automatic replacement is paused{f' ({job.pause.reason})' if job.pause.reason else ''}; `tmrun resume` lets it go on"


def breaker_limit(spec: Spec) -> int:
    """So many nodes that vanish within one lease time, all without a word, accuse the store or the network instead."""
    return max(3, math.ceil(spec.nnodes * BREAKER_SHARE))


def vanished(job: Job) -> list[int]:
    """Slots whose lease is gone and whose death nobody confirms."""
    seats = job.map.seats if job.map else ()
    return [i for i, s in enumerate(seats) if i not in job.done and not job.alive(s) and not _confirmed(job, i)]


def _mass_loss(job: Job, timers: Timers, now: float) -> bool:
    """The breaker has tripped, or trips now. Its timer runs from the trip and is not begun anew by losses that follow it closely, so
    that it only ever costs one lease time."""
    assert job.spec is not None and job.map is not None
    ttl, slots = job.spec.lease_ttl_s, vanished(job)
    if slots and "suspect" in timers.seen and timers.since("suspect", now) < ttl:
        return True
    fresh = [i for i in slots if timers.since(f"gone {i} {job.map.seats[i].incarnation}", now) < ttl]
    return len(fresh) >= breaker_limit(job.spec)


def _frozen(job: Job, timers: Timers, now: float) -> str:
    """Why nobody is replaced now; empty: go on."""
    assert job.spec is not None
    left, slots = job.spec.lease_ttl_s - timers.since("suspect", now), vanished(job)
    if "suspect" not in timers.seen or left <= 0 or not slots:
        return ""
    lost = f"{len(slots)} of {job.spec.nnodes} nodes vanished at once"
    return f"{lost}: suspecting the store or the network, replacing nobody for {left:.0f} s"


def _taking_over(job: Job, current: RankMap, failed: list[int]) -> str:
    """A joiner that has no state yet can only refuse to be a stayer, which would cost a restart. Empty: nobody is in between."""
    moved = [m for m in current.moves if m.slot not in failed]
    runs = {i: r.value for i, r in job.runs.items() if r.value.joined}
    return next(
        (f"{m.joiner.host} is still taking over" for m in moved if m.slot not in runs or runs[m.slot].incarnation != m.joiner.incarnation),
        "",
    )


def _program_error(job: Job, spec: Spec, trouble: Trouble) -> Decision:
    what = f"{trouble.host} rank {trouble.rank}: {trouble.text}"
    return _restart(job, what, trouble.exit_code, program=True)


def _restart_after_loss(job: Job, current: RankMap, failed: list[int], reason: str, timers: Timers, now: float) -> Decision:
    """Nobody is parked here, so a host that is only cut off may go on for a while: give its agent the time to end its workers."""
    assert job.spec is not None
    unsure = [i for i in failed if not _confirmed(job, i)]
    if any(timers.since(f"gone {i} {current.seats[i].incarnation}", now) < job.spec.lease_ttl_s * UNSEEN_SHARE for i in unsure):
        return Decision(None, f"{_what(job, unsure[0])}: presumed dead, restarting when it must have ended its workers")
    return _restart(job, reason, _exit_code(job, failed), program=False)


def _restart(job: Job, reason: str, exit_code: int, *, program: bool) -> Decision:
    assert job.spec is not None
    budget = job.spec.max_restarts if program else MACHINE_RESTARTS
    spent = job.program_restarts if program else job.machine_restarts
    if spent >= budget:
        return _end(job, JobState.FAILED, exit_code, reason if budget == 0 else f"{reason} (after {spent} restarts)")
    seats = planner.first_seats(job)
    if len(seats) < job.spec.nnodes:
        return Decision(None, f"waiting for nodes to restart: {len(seats)} of {job.spec.nnodes} are here")
    txn = transactions.start(job, seats, Kind.RESTART, reason, program=program)
    return Decision(txn, reason, f"restarting all workers (restart {job.restarts + 1}): {reason}")


def _replace(job: Job, spec: Spec, current: RankMap, failed: list[int], timers: Timers, now: float) -> Decision:
    if len(failed) > planner.MAX_MOVES:
        reason = f"{len(failed)} nodes were lost at once, more than one migration can move"
        return _restart_after_loss(job, current, failed, reason, timers, now)
    plan = planner.plan_moves(job, failed, resting=_resting(job, timers, now))
    if not plan.short:
        reason = "; ".join(_what(job, i) for i in failed)
        txn = transactions.propose(job, Kind.FAILURE, plan.moves, "", reason)
        unsaid = [_what(job, i) for i in failed if not job.trouble(i)]
        return Decision(txn, reason, "; ".join([*unsaid, f"plan: {_plan_text(job, plan)}"]))
    waited = timers.since("no standby", now)
    if waited > spec.node_wait_s and not planner.standbys(job, warm_only=False):
        return _end(job, JobState.FAILED, _exit_code(job, failed), f"{_what(job, failed[0])}; no standby within {spec.node_wait_s:.0f} s")
    return Decision(None, f"{_what(job, failed[0])}; {plan.why}")


def _resting(job: Job, timers: Timers, now: float) -> set[Host]:
    """Lemons that have not cooled down."""
    return {h for h in job.members if policy.lemon(job.maps, h) > timers.since(f"rests {h} {policy.strikes(job.maps, h)}", now)}


def _plan_text(job: Job, plan: planner.Plan) -> str:
    assert job.spec is not None
    return ", ".join(f"slot {m.slot} (ranks {ranks_text(job.spec.ranks(m.slot))}) {m.leaver.host} -> {m.joiner.host}" for m in plan.moves)


def _confirmed(job: Job, slot: int) -> bool:
    """Dead beyond doubt: reported by its own agent, by whoever saw the agent exit, or by a newer life of the same host."""
    assert job.map is not None
    seat = job.map.seats[slot]
    note = job.obituaries.get(seat.host)
    return job.trouble(slot) is not None or seat.host in job.members or (note is not None and note.incarnation == seat.incarnation)


def _what(job: Job, slot: int) -> str:
    assert job.map is not None
    seat = job.map.seats[slot]
    trouble = job.trouble(slot)
    return f"{seat.host} rank {trouble.rank}: {trouble.text}" if trouble else f"{seat.host} is gone (slot {slot})"


def _exit_code(job: Job, failed: list[int]) -> int:
    return next((job.troubles[i].exit_code for i in failed if job.trouble(i)), 1)


def _immovable(job: Job) -> str:
    """Why moving cannot work: the last attempt said so, or too many in a row were aborted. Empty: try."""
    if not job.movable:
        return "no rank is left to go on from" if job.told.movable else "the workers have not reached run.steps yet"
    tried = [m for m in job.aborted if m.kind is Kind.FAILURE]
    if tried and tried[-1].reason.startswith(judging.IMMOVABLE):
        return tried[-1].reason
    return _too_often(tried)


def _too_often(tried: list[Migration]) -> str:
    """Each attempt at other slots than before is a new one: leases of a rack that is gone run out one by one."""
    most = max(Counter(m.slots for m in tried).values(), default=0)
    return f"{most} migrations in a row were aborted, the last: {tried[-1].reason}" if most >= MAX_ABORTS else ""


def _parked(job: Job) -> Migration | None:
    """The aborted failure migration for which workers were told to stop, if nothing has been committed since."""
    return job.aborted[-1] if job.aborted and job.aborted[-1].kind is Kind.FAILURE else None


def _resync(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    """Workers are parked and nobody has failed (any more): a migration without moves lets them agree on a step and go on."""
    if job.done:
        return None
    parked = _parked(job)
    if parked is None:
        return _unexplained(job, spec, timers, now) or _deadlock(job, spec, timers, now)
    if _immovable(job):
        return Decision(None, held_back(job)) if job.pause else _restart(job, _immovable(job), 1, program=False)
    reason = f"all ranks are alive again (migration {parked.id}: {parked.reason})"
    return Decision(transactions.propose(job, Kind.FAILURE, (), "", reason), reason, f"{reason}; going on in place")


def _unexplained(job: Job, spec: Spec, timers: Timers, now: float) -> Decision | None:
    """Workers lost a connection to each other, everybody lives, and no lease has run out since: a link broke. Reconnect in place."""
    doubts = [d for d in job.doubts.values() if d.epoch == job.epoch]
    if not doubts:
        return None
    what = "; ".join(f"{d.host}: {d.text}" for d in doubts)
    left = DOUBT_SHARE * spec.lease_ttl_s - timers.since(f"doubt {job.epoch}", now)
    if left > 0:
        return Decision(None, f"{what}; waiting {left:.0f} s more for a death that would explain it")
    txn = transactions.propose(job, Kind.FAILURE, (), "", f"a connection broke between living nodes ({what})")
    return Decision(txn, what, f"{what}; nobody has died, connecting again in place")


def _deadlock(job: Job, spec: Spec, timers: Timers, now: float) -> Decision | None:
    """All ranks wait at the same place, nobody is behind: a dead connection, which a new one heals, or the program, which nothing heals."""
    found, limit = hang.finding(job), watchdog.limits(spec.hang_timeout)
    if found is None or found.blame is not watchdog.Blame.NOBODY or limit is None or spec.hang_action != "replace" or job.pause:
        return None
    patience = limit.late_s * (1 if hang.waits_in_vote(job) else 10)  # else all may be computing something rare
    left = patience - timers.since(f"deadlock {job.epoch}", now)
    if left > 0:
        return Decision(None, f"{found.why}; waiting {left:.0f} s more for somebody to move")
    if hang.same_place(job, found):
        return _restart(job, f"{found.why}, again after they were connected anew", 1, program=True)
    return Decision(transactions.propose(job, Kind.FAILURE, (), "", found.why), found.why, f"{found.why}; connecting again in place")


def _drains(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    if job.done:
        return Decision(None, "the job is ending: workers of a slot have finished")
    why = ""
    for op in job.open_ops():
        slots = [i for i, s in enumerate(current.seats) if s.host in op.hosts and i not in job.done]
        decision = _take_away(job, op, slots) if slots else _finish(job, op, timers, now)
        if decision.txn is not None:
            return decision
        why = decision.reason
    return Decision(None, why) if why else None


def _finish(job: Job, op: Operation, timers: Timers, now: float) -> Decision:
    busy = [h for h in op.hosts if job.runs_on(h) or _may_still_run(job, h, timers, now)]
    if busy:
        return Decision(None, f"waiting for the processes of {', '.join(busy)} to end")
    detail = f"{', '.join(op.hosts)} {'drained' if op.verb is Verb.DRAIN else 'replaced'} (safe to power off)"
    return Decision(transactions.finish_op(job, op, OpState.DONE, detail), detail, detail)


def _may_still_run(job: Job, host: Host, timers: Timers, now: float) -> bool:
    """A leaver has not confirmed the end of its processes, and nobody else can: not whoever saw its agent exit, not a newer life of the
    host. One that has been silent for a lease time has ended them itself."""
    left = job.leaving.get(host)
    if left is None:
        return False
    if job.alive(Seat(host, left.incarnation)):
        return True
    note = job.obituaries.get(host)
    if host in job.members or (note is not None and note.incarnation == left.incarnation):
        return False
    assert job.spec is not None
    return timers.since(f"left {host} {left.incarnation}", now) < job.spec.lease_ttl_s


_FORCED = "its node gives up its ranks now, without handing them over"


def _overdue(job: Job, timers: Timers, now: float) -> Operation | None:
    """A drain whose deadline has passed while its node still holds ranks. (The deadline starts anew with another coordinator.)"""
    held = {s.host for s in job.map.seats} if job.map and not job.pause else set()
    late = (o for o in job.open_ops() if o.force_after_s and timers.since(f"request {o.id}", now) > o.force_after_s)
    return next((o for o in late if held & set(o.hosts)), None)


def _take_away(job: Job, op: Operation, slots: list[int]) -> Decision:
    """Ranks leave a drained node by a handover; a replaced one gives them up, and the rule for failures moves them."""
    if op.verb is Verb.REPLACE:
        return Decision(None, f"waiting for {', '.join(op.hosts)} to give up its ranks")
    return _propose_drain(job, op, slots)


def _propose_drain(job: Job, op: Operation, slots: list[int]) -> Decision:
    if not all(i in job.runs and job.runs[i].value.joined for i in range(len(job.map.seats if job.map else ()))):
        return Decision(None, "waiting for all workers to reach run.steps")
    failed = _too_often([m for m in job.aborted if m.op == op.id])
    if failed:
        return Decision(transactions.finish_op(job, op, OpState.FAILED, failed), failed, f"drain {op.id} failed: {failed}")
    plan = planner.plan_moves(job, slots, op.to)  # at most MAX_MOVES; the rest follow in the next migration
    if not plan.moves:
        return Decision(None, plan.why)
    txn = transactions.propose(job, Kind.DRAIN, plan.moves, op.id, op.reason)
    return Decision(txn, plan.why, f"plan: {_plan_text(job, plan)}")


def job_state(job: Job) -> tuple[JobState, str]:
    """(state, why) for people."""
    if job.end:
        return job.end.state, job.end.reason
    if job.map is None or job.spec is None:
        return JobState.RENDEZVOUS, (_missing(job, job.spec, Timers(), 0) or "all nodes are here") if job.spec else "no job yet"
    failed = _failed(job)
    if job.pause and not job.open_migration:
        return JobState.PAUSED, "; ".join([*(_what(job, i) for i in failed), held_back(job)])
    if job.open_migration:
        return (
            JobState.RECOVERING if failed else JobState.MIGRATING
        ), f"migration {job.open_migration.id} ({job.open_migration.kind.value})"
    if failed and not planner.standbys(job):
        return JobState.WAITING, _replace(job, job.spec, job.map, failed, Timers(), 0).reason
    if failed:
        return JobState.RECOVERING, _what(job, failed[0])
    parked = _parked(job)
    if parked:
        return JobState.RECOVERING, f"migration {parked.id} was aborted: {parked.reason}"
    return JobState.RUNNING, ""
