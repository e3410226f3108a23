"""What people are shown, computed from what the store holds: the status and the history of a job as plain JSON values.

The field names are stable. May not know: how they are printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tmrun.core import codec, conditions, details, progress, states
from tmrun.core.heard import Heard
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import Host, JobState, Kind, NodeState, RankMap, Receiving, Run, Timing
from tmrun.core.states import known_hosts, node_state

API_VERSION = 1


UNKNOWN = "unknown"
"""The state of a job whose store does not answer."""


def status(job: Job, heard: Heard, rows: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """One screen. ``rows`` of ``history``."""
    state, reason = states.job_state(job)
    if state in (JobState.RENDEZVOUS, JobState.MIGRATING, JobState.RECOVERING, JobState.WAITING):
        reason = heard.reason or reason
    steps = progress.of_seats(job, heard.progress)
    moving = {r.host: _received(r) for r in heard.receiving}
    nodes = [{**node_row(job, h), **details.node(job, h, steps.get(h), heard.now), "received": moving.get(h)} for h in known_hosts(job)]
    step = progress.slowest(job, steps)
    migration = details.migration(job, heard.timings, step)
    if migration is not None:
        migration["transfers"] = details.transfers(migration, nodes)
    return {
        "api_version": API_VERSION,
        "job": job.keys.job,
        "state": state.value,
        "reason": reason,
        "epoch": job.epoch,
        "step": step,
        "step_s": max((p.step_s for p in steps.values()), default=None),
        "coordinator": job.leader.value.host if job.leader else None,
        "exit_code": job.end.exit_code if job.end else None,
        "checks": conditions.of(job, heard),
        "paused": {"reason": job.pause.reason} if job.pause else None,
        "migration": migration,
        "requests": details.open_requests(job),
        "command": list(job.spec.command) if job.spec else [],
        "nnodes": job.spec.nnodes if job.spec else None,
        "nproc": job.spec.nproc if job.spec else None,
        "standby": {
            "warm": sum(n["state"] == NodeState.STANDBY.value and not n["cordoned"] for n in nodes),
            "warming": sum(n["state"] == NodeState.WARMING.value for n in nodes),
            "wanted": job.spec.standby if job.spec else 0,
        },
        "gpus": {key: sum(n["gpus"][key] for n in nodes if n["gpus"]) for key in ("total", "used")},
        "nodes": nodes,
        "last": rows[-1] if rows else None,
    }


def without_store(job_id: str, lost: str, seen: str) -> dict[str, Any]:
    """The same of a job whose store does not answer. ``lost``: what was tried, ``seen``: what this machine knows without it."""
    known = status(Job(Keys(job_id)), Heard())
    return {**known, "state": UNKNOWN, "reason": seen, "checks": [conditions.condition("STORE_LOST", lost)]}


def _received(receiving: Receiving) -> dict[str, int] | None:
    """Of all ranks of a node, in bytes; None once everything arrived."""
    done, total = (sum(n) for n in zip(*receiving.ranks.values(), strict=True))
    return {"done": done, "total": total} if done < total else None


def node_row(job: Job, host: Host) -> dict[str, Any]:
    """One line of ``nodes``."""
    state, reason = node_state(job, host)
    slot = job.map.slot_of_host(host) if job.map else None
    run = job.runs.get(slot) if slot is not None else None
    mine = run is not None and run.value.host == host
    roles = {NodeState.STANDBY: "standby", NodeState.WARMING: "standby"}
    return {
        "name": host,
        "state": state.value,
        "reason": reason,
        "role": "active" if slot is not None else roles.get(state, "none"),
        "slot": slot,
        "ranks": list(job.spec.ranks(slot)) if job.spec and slot is not None else [],
        "pids": list(run.value.pids) if run is not None and mine else [],
        "rehearsal": _rehearsal(job, host),
        "gpus": _gpus(job, host, run.value if run is not None and mine else None),
    }


def _gpus(job: Job, host: Host, run: Run | None) -> dict[str, int] | None:
    """Accelerators there and in use, as the node's workers found them; None before they have told."""
    member = job.members.get(host)
    machine = (run.machine if run else None) or (member.value.machine if member else None)
    return {"total": machine.gpus, "used": len(machine.gpus_used)} if machine else None


def _rehearsal(job: Job, host: Host) -> dict[str, Any] | None:
    """A warm standby's report: what was warmed."""
    member = job.members.get(host)
    if member is None or not member.value.warm or member.value.rehearsal is None:
        return None
    machine = member.value.machine
    return {**codec.to_plain(member.value.rehearsal), "step_s": machine.step_s if machine else None}


def history(maps: Iterable[RankMap], timings: Mapping[int, Sequence[Timing]], nproc: int) -> list[dict[str, Any]]:
    """One row an epoch. Times in seconds, None when not (yet) reported."""
    return [_row(m, timings.get(m.epoch, ()), nproc) for m in sorted(maps, key=lambda m: m.epoch)]


def _row(current: RankMap, timings: Sequence[Timing], nproc: int) -> dict[str, Any]:
    return {
        "epoch": current.epoch,
        "cause": current.kind.value,
        "reason": current.reason,
        "leaver": ",".join(m.leaver.host for m in current.moves),
        "joiner": ",".join(m.joiner.host for m in current.moves),
        "ranks": [r for m in current.moves for r in range(m.slot * nproc, (m.slot + 1) * nproc)],
        "step": current.resume.target,
        **phases(current.kind, timings, moved=bool(current.moves)),
        "bytes": sum(t.bytes for t in timings if t.role == "joiner") or None,
        "cold": _cold(timings),
        "groups": _groups(timings),
    }


def _groups(timings: Sequence[Timing]) -> dict[str, list[str]] | None:
    """Process groups of all ranks: which have new connections, which keep theirs. A rank tells of its own only."""
    rebuilt, kept = ({name for t in timings for name in getattr(t, fate)} for fate in ("rebuilt", "kept"))
    return {"rebuilt": sorted(rebuilt), "kept": sorted(kept)} if rebuilt or kept else None


def _cold(timings: Sequence[Timing]) -> dict[str, int] | None:
    """What the joiners' rehearsals had not warmed, by kind; of all joiners together."""
    joiners = [t for t in timings if t.role == "joiner" and t.resumed]
    kinds = {kind for t in joiners for kind in t.cold}
    return {kind: sum(t.cold.get(kind, 0) for t in joiners) for kind in sorted(kinds)} if joiners else None


def phases(kind: Kind, timings: Sequence[Timing], *, moved: bool = True) -> dict[str, float | None]:
    """Split the pause that the slowest stayer measured.

    pause_s: end of the last step before -> end of the first new step, less the median step. detect_s: first sign of trouble at a
    stayer -> notice. bind_s: a failure's joiner takes its rank, in a drain the wait at the boundary for the commit. comm_s: new
    communicators, as far as anybody waited for them. state_s: the joiner receives. redo_s: from resuming to the end of the redone step.
    """
    stayers = [t for t in timings if t.role == "stayer"]
    joiners = [t for t in timings if t.role == "joiner"]
    resumed = [t for t in stayers if t.resumed]
    if not resumed or (moved and not joiners):
        return dict.fromkeys(("detect_s", "bind_s", "comm_s", "state_s", "redo_s", "pause_s"))
    wait, switch = _most(stayers, "wait"), _most(stayers, "switch")
    pause = max(t.pause_s for t in resumed)
    bind = wait if kind is Kind.DRAIN else min(wait, _most(joiners, "bind"))
    return {
        "detect_s": _most(stayers, "detect"),
        "bind_s": bind,
        "comm_s": wait - bind + switch,
        # a drain's joiner listens before the leaver has stopped: only what the stayers waited for counts
        "state_s": min(_most(joiners, "state"), pause) if kind is Kind.DRAIN else _most(joiners, "state"),
        "redo_s": max(t.redo_s for t in resumed),
        "pause_s": pause,
    }


def _most(timings: Sequence[Timing], phase: str) -> float:
    return max((t.phases.get(phase, 0.0) for t in timings), default=0.0)
