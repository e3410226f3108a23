"""What earlier attempts to move ranks say about the next one. May not know: how an attempt is made."""

from __future__ import annotations

from collections import Counter

from tmrun.core import migration as judging
from tmrun.core import planner
from tmrun.core.membership import Job
from tmrun.core.model import Kind, Migration
from tmrun.core.ranklist import ranks_named

MAX_ABORTS = 5
"""So many attempts in a row to move the same slots may be aborted before the workers are restarted instead."""


def parked(job: Job) -> Migration | None:
    """The aborted failure migration for which workers were told to stop, if nothing has been committed since."""
    return job.aborted[-1] if job.aborted and job.aborted[-1].kind is Kind.FAILURE else None


def returning(job: Job) -> str:
    """Who has registered again, all claims having been lost with the leases, and has not said yet whether its workers live: for people.
    Empty: nobody is waited for."""
    if job.movable or not job.told.movable or job.map is None:
        return ""
    silent = (
        s.host for i, s in enumerate(job.map.seats) if job.alive(s) and i not in job.runs and i not in job.done and not job.trouble(i)
    )
    back = next(silent, None)
    return f"{back} is back, and says next whether its workers live" if back else ""


def immovable(job: Job) -> str:
    """Why moving cannot work: the last attempt said so, or too many in a row were aborted. Empty: try."""
    if not job.movable:
        return "no rank is left to go on from" if job.told.movable else "the workers have not reached run.steps yet"
    tried = [m for m in job.aborted if m.kind is Kind.FAILURE]
    if tried and tried[-1].reason.startswith(judging.IMMOVABLE):
        return tried[-1].reason
    return too_often(tried)


def too_often(tried: list[Migration]) -> str:
    """Each attempt at other slots than before is a new one: leases of a rack that is gone run out one by one."""
    most = max(Counter(m.slots for m in tried).values(), default=0)
    return f"{most} migrations in a row were aborted, the last: {tried[-1].reason}" if most >= MAX_ABORTS else ""


def plan_text(job: Job, plan: planner.Plan) -> str:
    """Who takes over from whom."""
    assert job.spec is not None
    return ", ".join(f"slot {m.slot} ({ranks_named(job.spec.ranks(m.slot))}) {m.leaver.host} -> {m.joiner.host}" for m in plan.moves)
