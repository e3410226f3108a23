"""What people are shown, computed from what the store holds: the status and the history of a job as plain JSON values.

The field names are stable. May not know: how they are printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tmrun.core import codec, details, hang, losses, states, straggler
from tmrun.core import progress as accounts
from tmrun.core.membership import Job
from tmrun.core.model import Host, JobState, Kind, NodeState, Progress, RankMap, Receiving, Run, Timing
from tmrun.core.states import known_hosts, node_state

API_VERSION = 1


def status(
    job: Job,
    progress: Iterable[Progress],
    rows: Sequence[Mapping[str, Any]],
    told: str = "",
    timings: Sequence[Timing] = (),
    now: float = 0.0,
    receiving: Iterable[Receiving] = (),
) -> dict[str, Any]:
    """One screen. ``progress`` of all nodes, ``rows`` of ``history``, ``told``: the coordinator's own last words on what it waits for,
    ``timings`` of the newest epoch, ``now``: the reader's wall clock, for ages, ``receiving``: state on its way."""
    state, reason = states.job_state(job)
    if state in (JobState.RENDEZVOUS, JobState.MIGRATING, JobState.RECOVERING, JobState.WAITING):
        reason = told or reason
    steps = accounts.of_seats(job, progress)
    moving = {r.host: _received(r) for r in receiving}
    nodes = [
        {**node_row(job, host), **details.node(job, host, steps.get(host), now), "received": moving.get(host)} for host in known_hosts(job)
    ]
    step = accounts.slowest(job, steps)
    migration = details.migration(job, timings, step)
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
        "checks": [*checks(job), *slow_nodes(job, steps)],
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


def checks(job: Job) -> list[dict[str, str]]:
    """What an operator should look at, as (code, text); empty when healthy."""
    found = []
    if job.spec and job.map and job.end is None:
        states = [node_state(job, h)[0] for h in known_hosts(job) if not job.cordoned(h)]
        warm = states.count(NodeState.STANDBY)
        if warm + states.count(NodeState.WARMING) < job.spec.standby:
            found.append({"code": "STANDBY_LOW", "text": f"{warm} of {job.spec.standby} standbys"})
        elif warm < job.spec.standby:
            found.append({"code": "STANDBY_COLD", "text": f"{warm} of {job.spec.standby} standbys are warm"})
        gone = len(losses.vanished(job))
        if gone >= losses.breaker_limit(job.spec):
            text = f"{gone} of {job.spec.nnodes} nodes are gone and nobody confirms their deaths: look at the store and the network"
            found.append({"code": "STORE_SUSPECT", "text": text})
    if job.end is None:
        found += details.checks(job)
    if job.pause is not None and job.end is None:
        found.append({"code": "PAUSED", "text": losses.held_back(job)})
    stuck = hang.finding(job) if job.end is None else None
    if stuck is not None:
        found.append({"code": "HANG", "text": stuck.why})
    if job.end is None and job.leader is None:
        found.append({"code": "NO_COORDINATOR", "text": "no agent coordinates at the moment"})
    return found


def slow_nodes(job: Job, steps: Mapping[Host, Progress]) -> list[dict[str, str]]:
    """Seated nodes that compute longer than the others, by the latest measurements."""
    if job.spec is None or job.map is None or job.spec.straggler == "off":
        return []
    busy = {s.host: steps[s.host].busy_s for s in job.map.seats if s.host in steps}
    found = straggler.ratios(busy).items()
    return [{"code": "SLOW_NODE", "text": f"{h} computes {r:.2f} times as long as the others"} for h, r in found]


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
    }


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
