"""Rules for drains and replacements that people asked for: move the ranks, confirm the end, force what is late.

May not know: failures.
"""

from __future__ import annotations

from collections.abc import Collection

from tmrun.core import attempts, losses, planner, preemption, storehosts, transactions
from tmrun.core.decision import Decision, Timers
from tmrun.core.membership import Job
from tmrun.core.model import Host, Kind, Operation, OpState, RankMap, Seat, Spec, Verb


def decide(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    """The oldest open request that can be carried on."""
    if job.done:
        return Decision(None, "the job is ending: workers of a slot have finished")
    why = ""
    for op in job.open_ops():
        slots = [i for i, s in enumerate(current.seats) if s.host in op.hosts and i not in job.done]
        decision = _take_away(job, op, slots, timers, now) if slots else _finish(job, op, timers, now)
        if decision.txn is not None:
            return decision
        why = decision.reason
    return Decision(None, why) if why else None


def carried_out(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    """The end of a request whose hosts hold no ranks, whatever the job waits for: a spare host that is back is no standby before it hears
    of it, and it may be what the job waits for."""
    over = (op for op in job.open_ops() if not any(current.slot_of_host(h) is not None for h in op.hosts))
    decisions = (_finish(job, op, timers, now) for op in ([] if job.done else over))
    return next((d for d in decisions if d.txn is not None), None)


def _finish(job: Job, op: Operation, timers: Timers, now: float) -> Decision:
    busy = [h for h in op.hosts if job.runs_on(h) or _may_still_run(job, h, timers, now)]
    if busy:
        return Decision(None, f"waiting for the processes of {', '.join(busy)} to end")
    what = storehosts.warning(job, op.hosts) or "safe to power off"
    detail = f"{', '.join(op.hosts)} {'drained' if op.verb is Verb.DRAIN else 'replaced'} ({what})"
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


FORCED = "its node gives up its ranks now, without handing them over"


def force(job: Job, timers: Timers, now: float) -> Decision | None:
    """A drain whose node still holds ranks and that cannot be waited for: its deadline has passed (which starts anew with another
    coordinator), or its machine is being shut down and nobody could take the ranks over."""
    held = {s.host for s in job.map.seats} if job.map else set()
    for op in job.open_ops():
        if op.force_after_s and held & set(op.hosts) and (op.shutdown or not job.pause):
            why = f"drain {op.id} is overdue" if _late(op, timers, now) else _stranded(job, op)
            if why:
                return Decision(transactions.force(job, op), why, f"{why}: {FORCED}")
    return None


def _late(op: Operation, timers: Timers, now: float) -> bool:
    """SIGTERM to a host that is being drained allows a time of its own, from then on; a deadline that is nearer stays."""
    return timers.since(asked(op), now) > op.force_after_s or timers.since(shut_down(op), now) > preemption.HANDOVER_S


def asked(op: Operation) -> str:
    """Name of the timer of its deadline."""
    return f"request {op.id}"


def shut_down(op: Operation) -> str:
    """Name of the timer that runs from SIGTERM to its host on."""
    return f"request {op.id} {op.shutdown}"


def _stranded(job: Job, op: Operation) -> str:
    """Why nobody could take the ranks over now, if that is what the request does not want to wait for."""
    if not op.shutdown or job.open_migration is not None or losses.taking_over(job):
        return ""  # what is under way must not be disturbed
    if not (job.movable or job.told.movable):
        return f"{', '.join(op.hosts)}: a script without run.steps cannot be handed over"
    return "" if planner.standbys(job) else f"{', '.join(op.hosts)}: no standby is warm"


def _take_away(job: Job, op: Operation, slots: list[int], timers: Timers, now: float) -> Decision:
    """Ranks leave a drained node by a handover; a replaced one gives them up, and the rule for failures moves them."""
    if op.verb is Verb.REPLACE:
        return Decision(None, f"waiting until the ranks of {', '.join(op.hosts)} are given up")
    resting = () if op.force_after_s else losses.resting(job, timers, now)  # against a deadline a lemon is better than none
    return _propose_drain(job, op, slots, resting)


def _propose_drain(job: Job, op: Operation, slots: list[int], resting: Collection[Host]) -> Decision:
    if not all(i in job.runs and job.runs[i].value.joined for i in range(len(job.map.seats if job.map else ()))):
        return Decision(None, "waiting for all workers to reach run.steps")
    failed = attempts.too_often([m for m in job.aborted if m.op == op.id])
    if failed:
        return Decision(transactions.finish_op(job, op, OpState.FAILED, failed), failed, f"drain {op.id} failed: {failed}")
    plan = planner.plan_moves(job, slots, op.to, resting)  # at most MAX_MOVES; the rest follow in the next migration
    if not plan.moves:
        return Decision(None, plan.why)
    txn = transactions.propose(job, Kind.DRAIN, plan.moves, op.id, op.reason)
    return Decision(txn, plan.why, f"plan: {attempts.plan_text(job, plan)}")
