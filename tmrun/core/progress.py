"""How far those are who hold the slots now. May not know: who is shown it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tmrun.core.membership import Job
from tmrun.core.model import Host, Progress


def of_seats(job: Job, told: Iterable[Progress]) -> dict[Host, Progress]:
    """The accounts of the nodes that hold slots, by node, without what one told of an earlier life: a node that was drained and has
    joined again, or whose workers were started anew, is not where it was then."""
    if job.map is None:
        return {}
    since = _since(job)
    by_host = {p.host: p for p in told}
    found = {s.host: by_host[s.host] for s in job.map.seats if s.host in by_host}
    return {h: p for h, p in found.items() if not p.epoch or p.epoch >= since[h]}  # an older tmrun does not say


def slowest(job: Job, told: Mapping[Host, Progress]) -> int | None:
    """The step that the slowest slot has begun."""
    return min((told[s.host].step for s in (job.map.seats if job.map else ()) if s.host in told), default=None)


def _since(job: Job) -> dict[Host, int]:
    """node -> the epoch since which it has held its slot without a break."""
    assert job.map is not None
    found = {s.host: job.map.generation for s in job.map.seats}
    for current in job.maps:
        if current.epoch > job.map.generation:
            found |= {m.joiner.host: current.epoch for m in current.moves if m.joiner.host in found}
    return found
