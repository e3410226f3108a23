"""Rules for workers that wait although nobody has failed: they agree on a step, connect anew and go on in place; or the job ends, where
those that they wait for have left the loop. May not know: drains."""

from __future__ import annotations

from tmrun.core import attempts, hang, losses, restarts, transactions, watchdog
from tmrun.core.decision import DOUBT_SHARE, Decision, Timers, ending
from tmrun.core.membership import Job
from tmrun.core.model import JobState, Kind, RankMap, Spec
from tmrun.core.ranklist import ranks_named

SAME_NUMBER = "do all run the same number of steps?"


def decide(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    """Workers are parked and nobody has failed (any more): a migration without moves lets them agree on a step and go on."""
    left = _left_early(job, spec, current, timers, now)
    if left is not None or job.done:
        return left
    parked = attempts.parked(job)
    if parked is None:
        return _unexplained(job, spec, timers, now) or _deadlock(job, spec, timers, now)
    back = attempts.returning(job)
    if back:
        return Decision(None, back)
    immovable = attempts.immovable(job)
    if immovable and job.pause:
        return Decision(None, losses.held_back(job))
    if immovable:
        return restarts.restart(job, immovable, 1, timers, now, program=False)
    reason = f"all ranks are alive again (migration {parked.id}: {parked.reason})"
    return Decision(transactions.propose(job, Kind.FAILURE, (), "", reason), reason, f"{reason}; going on in place")


def _left_early(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    """Ranks have ended well, or their loop has, and others are in the middle of a step: no migration can make them run the same loop."""
    found = hang.finding(job)
    if found is not None and found.blame is watchdog.Blame.PROGRAM and spec.hang_action == "replace":
        return restarts.restart(job, f"{found.why}: {SAME_NUMBER}", 1, timers, now, program=True)
    seats = {s.host: i for i, s in enumerate(current.seats)}
    waiting = [d for d in job.open_doubts() if seats.get(d.host, -1) not in job.done]
    ended = {*(rank for i in job.done for rank in spec.ranks(i)), *(rank for d in waiting for rank in d.ended)}
    over = sorted(ended or hang.left(job))
    if not waiting or not over:
        return None
    how = "ended well" if ended else "left the loop"
    reason = f"{ranks_named(over)} {how} while others train: {SAME_NUMBER} ({waiting[0].host}: {waiting[0].text})"
    if timers.since(f"doubt {job.epoch}", now) < DOUBT_SHARE * spec.lease_ttl_s:
        return Decision(None, f"{reason}; waiting whether these end, too")
    return ending(job, JobState.FAILED, 1, reason) if ended else restarts.restart(job, reason, 1, timers, now, program=True)


def _unexplained(job: Job, spec: Spec, timers: Timers, now: float) -> Decision | None:
    """Workers lost a connection to each other, everybody lives, and no lease has run out since: a link broke. Reconnect in place."""
    doubts = job.open_doubts()
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
        return restarts.restart(job, f"{found.why}, again after they were connected anew", 1, timers, now, program=True)
    return Decision(transactions.propose(job, Kind.FAILURE, (), "", found.why), found.why, f"{found.why}; connecting again in place")
