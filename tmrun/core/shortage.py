"""For how long a job has been short of nodes; after ``Spec.node_wait_s`` it ends.

The coordinator of the moment counts by its own clock, and tells now and then how far it is, so that the next one goes on from there. What
was told counts for the map that it was told of. May not know: what is done about it.
"""

from __future__ import annotations

from tmrun.core import losses, planner
from tmrun.core.decision import Timers
from tmrun.core.membership import Job
from tmrun.core.model import Seat
from tmrun.core.plural import some

TOLD_SHARE = 0.05
"""Of ``node_wait_s``: what a change of coordinators may add to the wait."""


def timer(job: Job) -> str:
    """Its name; another map is another wait."""
    return f"short {job.epoch}"


def begun(job: Job, now: float, *, restarts: bool = False) -> dict[str, float]:
    """The timer and when it began, by this coordinator's clock, if nodes are lacking now. Before the first map it goes on until that is
    there, whoever comes and leaves again meanwhile. ``restarts``: all workers are to start anew, and cannot, although none has failed."""
    if job.spec is None or job.end is not None or job.pause is not None:
        return {}
    if job.map is not None and not restarts and not _lacks(job, job.spec.nnodes):
        return {}
    return {timer(job): now - (job.told.short_s if job.told.epoch == job.epoch else 0.0)}


def _lacks(job: Job, nnodes: int) -> bool:
    """Fewer hosts than have to be replaced are warm, or fewer than a restart needs are here."""
    failed = losses.failed(job)
    return bool(failed) and (len(planner.standbys(job)) < len(failed) or len(planner.first_seats(job)) < nnodes)


def over(job: Job, timers: Timers, now: float) -> bool:
    """The job does not wait any longer."""
    return job.spec is not None and timers.since(timer(job), now) > job.spec.node_wait_s


def to_tell(job: Job, timers: Timers, now: float) -> float:
    """What the next coordinator has to know, in coarse steps, seconds."""
    step = job.spec.node_wait_s * TOLD_SHARE if job.spec is not None else 0.0
    return timers.since(timer(job), now) // step * step if step else 0.0


def missing(job: Job, seats: tuple[Seat, ...]) -> str:
    """Who is not among those that could run the job, as far as anybody can know: by name, or by the node ranks that nobody asked for."""
    assert job.spec is not None
    here = [s.host for s in seats]
    if job.map is not None:
        return f"missing: {some([s.host for s in job.map.seats if s.host not in here])}"
    asked = {job.members[host].value.node_rank for host in here}
    absent = [f"node rank {i}" for i in range(job.spec.nnodes) if i not in asked]
    return f"missing: {some(absent)}" if min(asked, default=-1) >= 0 else f"here: {some(here)}"
