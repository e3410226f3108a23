"""Rules for what no move can heal: all workers start anew, within a budget and once there are nodes, or the job ends.

May not know: moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tmrun.core import losses, planner, policy, shortage, transactions
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


def program_error(job: Job, trouble: Trouble, timers: Timers, now: float) -> Decision:
    """The program's own error: no other machine would do better."""
    what = f"{trouble.host} rank {trouble.rank}: {trouble.text}"
    return restart(job, what, trouble.exit_code, timers, now, program=True)


def after_loss(job: Job, current: RankMap, failed: list[int], reason: str, timers: Timers, now: float) -> Decision:
    """Nobody is parked here, so a host that is only cut off may go on for a while: give its agent the time to end its workers.

    A rank that dies the same way again is charged to the program: no other machine would do better."""
    assert job.spec is not None
    unsure = [i for i in failed if not losses.confirmed(job, i)]
    if any(timers.since(f"gone {i} {current.seats[i].incarnation}", now) < job.spec.lease_ttl_s * UNSEEN_SHARE for i in unsure):
        return Decision(None, f"{losses.what(job, unsure[0])}: presumed dead, restarting when it must have ended its workers")
    accused = [i for i in failed if losses.accuses(job, i)]
    told = (t for t in map(job.trouble, accused) if t is not None)
    again = next((t for t in told if policy.repeated(job.maps, t.rank, t.cause)), None)
    code = losses.exit_code(job, failed) if again is None else again.exit_code
    if again is not None:
        reason = f"{again.host} rank {again.rank}: {again.text}, as before an earlier restart: that follows the rank"
    return restart(job, reason, code, timers, now, program=again is not None, accused=accused)


def restart(job: Job, reason: str, exit_code: int, timers: Timers, now: float, *, program: bool, accused: Sequence[int] = ()) -> Decision:
    """All workers anew; ``exit_code`` is the job's when the budget is spent. ``program``: it is charged to ``--max-restarts``.
    ``accused``: slots whose failure is remembered."""
    assert job.spec is not None
    budget = job.spec.max_restarts if program else MACHINE_RESTARTS
    row = 0 if job.told.lasted or job.map is None else job.map.row
    spent = job.program_restarts if program else row
    if spent >= budget:
        after = f" (after {many(spent, 'restart')}{'' if program else ' in a row'})" if budget else ""
        return ending(job, JobState.FAILED, exit_code, reason + after)
    seats = planner.restart_seats(job, losses.resting(job, timers, now))
    if len(seats) < job.spec.nnodes:
        here, who = f"{len(seats)} of {job.spec.nnodes}", shortage.missing(job, seats)
        if shortage.over(job, timers, now):
            within = f"only {here} nodes to restart on within {job.spec.node_wait_s:.0f} s; {who}"
            return replace(ending(job, JobState.FAILED, exit_code, f"{reason}; {within}"), lacking=True)
        return Decision(None, f"waiting for nodes to restart: {here} here, {who}", lacking=True)
    txn = transactions.start(job, seats, Kind.RESTART, reason, program=program, row=row if program else row + 1, failed=accused)
    return Decision(txn, reason, f"restarting all workers (restart {job.restarts + 1}): {reason}")
