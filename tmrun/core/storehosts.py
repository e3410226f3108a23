"""Hosts that run the job's store beside their ranks: their ranks can move, the store cannot. May not know: stores, endpoints."""

from __future__ import annotations

from collections.abc import Iterable

from tmrun.core.membership import Job, natural
from tmrun.core.model import Host
from tmrun.core.plural import some


def warning(job: Job, hosts: Iterable[Host]) -> str:
    """What switching these hosts off would do to the store; empty: nothing."""
    keep = [h for h in hosts if h in job.members and job.members[h].value.store_members]
    if not keep:
        return ""
    members = job.members[keep[0]].value.store_members
    verb = "runs" if len(keep) == 1 else "run"
    if len(keep) > members // 2:
        what = "the job's only store" if members == 1 else f"{len(keep)} of the {members} etcds of the job's store"
        return f"{some(keep)} {verb} {what}: switched off, the job ends"
    return f"{some(keep)} {verb} {len(keep)} of the {members} etcds of the job's store, of which only {members // 2} may be off"


def others(job: Job, own: Iterable[Host]) -> tuple[Host, ...]:
    """Registered nodes of other hosts than the one that has ``own``."""
    return tuple(sorted(job.members.keys() - set(own), key=natural))


def users(job: Job, own: Iterable[Host], *, waits: bool) -> tuple[Host, ...]:
    """Nodes of other hosts that need the store; none: it may end.

    After an outage of the store all leases may be gone. Who holds ranks keeps them then, for a while (``waits``), and registers again.
    """
    mine = set(own)
    seated = {s.host for s in job.map.seats} - mine if job.map and waits else set()
    return others(job, mine) or tuple(sorted(seated, key=natural))
