"""What an operator looks at closely: the migration that is going on, phase by phase, and where a node is. Plain JSON values.

May not know: how it is printed, clocks (ages are told by whoever has one).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tmrun.core import migration as judging
from tmrun.core.membership import Job
from tmrun.core.model import Event, Host, Migration, Phase, Progress, Timing
from tmrun.core.plural import some
from tmrun.core.story import EventKind


def migration(job: Job, timings: Sequence[Timing] = (), step: int | None = None) -> dict[str, Any] | None:
    """The open migration, or the committed one whose ranks are not all running yet.

    ``timings``: the workers' accounts of the newest epoch; one that got lost does not keep a migration open, because ``step``, which the
    slowest node has begun, proves that everybody went on.

    ``phases``: [{name, state: done|now|next, done, total, bytes, detail}], in order; what ``now`` waits for is in ``detail``.
    """
    if job.migration is None or job.map is None or job.spec is None:
        return None
    current = job.migration.value
    committed = current.phase is Phase.COMMITTED and job.map.migration == current.id
    if current.phase is Phase.ABORTED or (not committed and job.open_migration is None):
        return None
    if committed and step is not None and step > job.map.resume.target:
        return None
    phases = [_prepare(job, current, committed), _commit(job, committed), *_after(job, current, timings, committed)]
    if committed and all(p["state"] == "done" for p in phases):
        return None
    return {
        "id": current.id,
        "epoch": current.base_epoch + 1,
        "kind": current.kind.value,
        "phase": current.phase.value,
        "reason": current.reason,
        "op": current.op or None,
        "moves": [
            {"slot": m.slot, "ranks": list(job.spec.ranks(m.slot)), "leaver": m.leaver.host, "joiner": m.joiner.host} for m in current.moves
        ],
        "phases": _in_order(phases),
    }


def transfers(migration: dict[str, Any] | None, nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much of its state each joiner of a migration has, in bytes."""
    joiners = {m["joiner"] for m in migration["moves"]} if migration else set()
    return [{"node": n["name"], **n["received"]} for n in nodes if n["name"] in joiners and n["received"]]


def _phase(name: str, done: int, total: int, detail: str = "") -> dict[str, Any]:
    return {"name": name, "state": "done" if done >= total else "now", "done": done, "total": total, "bytes": None, "detail": detail}


def _in_order(phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only the first unfinished phase is going on; what comes after it is next."""
    open_already = False
    for phase in phases:
        if phase["state"] != "done":
            phase["state"], phase["detail"] = ("next", "") if open_already else ("now", phase["detail"])
            open_already = True
    return phases


def _prepare(job: Job, current: Migration, committed: bool) -> dict[str, Any]:
    if committed:
        count = len(job.votes) or 1
        return _phase("prepare", count, count)
    total, missing = len(judging.required(job, current)), judging.missing(job, current)
    return _phase("prepare", total - len(missing), total, f"waiting for {some(missing)}" if missing else "")


def _commit(job: Job, committed: bool) -> dict[str, Any]:
    stops = {v.value.stop_step for v in job.votes.values() if v.value.stop_step is not None}
    where = f"stop at step {max(stops)}" if stops else ""
    return _phase("commit", int(committed), 1, where)


def _after(job: Job, current: Migration, timings: Sequence[Timing], committed: bool) -> list[dict[str, Any]]:
    """What follows the commit: joiners take their ranks and receive their state, everybody goes on."""
    assert job.spec is not None and job.map is not None
    moved = len(current.moves) * job.spec.nproc
    stayers = job.spec.world - moved
    joiners = [t for t in timings if t.role == "joiner"] if committed else []
    resumed = [t for t in timings if t.role == "stayer" and t.resumed] if committed else []
    received = sum(t.bytes for t in joiners)
    phases = [_phase("state", len(joiners), moved, "joiners receive their state")] if moved else []
    if joiners and received:
        phases[0]["bytes"] = received
    return [*phases, _phase("resume", len(resumed), stayers, "workers run their next step")]


def open_requests(job: Job) -> list[dict[str, Any]]:
    """Operators' requests that are not finished."""
    return [
        {"id": o.id, "verb": o.verb.value, "nodes": list(o.hosts), "reason": o.reason, "force_after_s": o.force_after_s or None}
        for o in job.open_ops()
    ]


def node(job: Job, host: Host, progress: Progress | None, now: float) -> dict[str, Any]:
    """Where a node is, what it is, what operators want of it. ``now``: the reader's wall clock in seconds, 0 when it has none.

    ``step_age_s``: since the node last said that it had got further, by wall clocks (so only as good as they are).
    """
    member = job.members.get(host)
    admin = job.admins.get(host)
    age = max(0.0, now - progress.time) if progress is not None and progress.time and now else None
    return {
        "step": progress.step if progress else None,
        "step_s": progress.step_s if progress else None,
        "step_age_s": age,
        "labels": dict(member.value.labels) if member else {},
        "address": member.value.address if member else None,
        "cordoned": bool(admin and (admin.cordoned or admin.draining)),
        "cordon_reason": (admin.cordon_reason or admin.reason) if admin else "",
    }


def events(found: Iterable[Event]) -> list[dict[str, Any]]:
    """The story in the order of the writers' clocks."""
    return [event(e) for e in sorted(found, key=lambda e: e.time)]


def event(told: Event) -> dict[str, Any]:
    """One line of the story; what hooks are given."""
    return {"time": told.time, "node": told.host, "kind": told.kind or EventKind.NOTE.value, "text": told.text}
