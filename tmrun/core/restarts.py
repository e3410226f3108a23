"""Rules for what no move can heal: all workers start anew, within a budget, or the job ends. May not know: moves."""

from __future__ import annotations

from tmrun.core import losses, planner, transactions
from tmrun.core.decision import Decision, Timers, ending
from tmrun.core.membership import Job
from tmrun.core.model import UNSEEN_SHARE, JobState, Kind, RankMap, Trouble
from tmrun.core.plural import many

MACHINE_RESTARTS = 10
"""Restarts of the whole job in a row that lost machines may cost; ``--max-restarts`` bounds those that the program itself causes."""
LASTED_S = 600.0
"""Workers that trained for so long without a failure have made progress: the row begins anew."""
LASTED_PLAIN_S = 3600.0
"""The same for workers of a script that never reaches ``run.steps``, or has not yet: they run, and cannot say whether they train."""


def program_error(job: Job, trouble: Trouble) -> Decision:
    """The program's own error: no other machine would do better."""
    what = f"{trouble.host} rank {trouble.rank}: {trouble.text}"
    return restart(job, what, trouble.exit_code, program=True)


def after_loss(job: Job, current: RankMap, failed: list[int], reason: str, timers: Timers, now: float) -> Decision:
    """Nobody is parked here, so a host that is only cut off may go on for a while: give its agent the time to end its workers."""
    assert job.spec is not None
    unsure = [i for i in failed if not losses.confirmed(job, i)]
    if any(timers.since(f"gone {i} {current.seats[i].incarnation}", now) < job.spec.lease_ttl_s * UNSEEN_SHARE for i in unsure):
        return Decision(None, f"{losses.what(job, unsure[0])}: presumed dead, restarting when it must have ended its workers")
    return restart(job, reason, losses.exit_code(job, failed), program=False)


def restart(job: Job, reason: str, exit_code: int, *, program: bool) -> Decision:
    """All workers anew; ``exit_code`` is the job's when the budget is spent. ``program``: it is charged to ``--max-restarts``."""
    assert job.spec is not None
    budget = job.spec.max_restarts if program else MACHINE_RESTARTS
    row = 0 if job.told.lasted or job.map is None else job.map.row
    spent = job.program_restarts if program else row
    if spent >= budget:
        after = f" (after {many(spent, 'restart')}{'' if program else ' in a row'})" if budget else ""
        return ending(job, JobState.FAILED, exit_code, reason + after)
    seats = planner.first_seats(job)
    if len(seats) < job.spec.nnodes:
        return Decision(None, f"waiting for nodes to restart: {len(seats)} of {job.spec.nnodes} here")
    txn = transactions.start(job, seats, Kind.RESTART, reason, program=program, row=row if program else row + 1)
    return Decision(txn, reason, f"restarting all workers (restart {job.restarts + 1}): {reason}")
