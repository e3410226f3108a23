"""What would happen if these nodes were drained now: the moves, where the state comes from, what stands in the way.

It asks the planner that the coordinator asks, on a snapshot in which the drain has been requested; so it is what will be done, unless
something changes meanwhile. May not know: how it is printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tmrun.core import placement, planner, storehosts
from tmrun.core.membership import Job
from tmrun.core.model import Admin, Host, Kind, Move
from tmrun.core.plural import many


@dataclass(frozen=True, slots=True)
class Foresight:
    """``blockers``: why it could not be done now, each with its node; ``notes``: what else one should know."""

    moves: tuple[Move, ...]
    blockers: tuple[str, ...]
    notes: tuple[str, ...]
    pause_s: tuple[float, float] | None
    """Shortest and longest pause of this job's drains so far; None: there was none."""
    bytes_a_rank: int | None


def drain(job: Job, hosts: Sequence[Host], rows: Sequence[Mapping[str, Any]], to: str = "") -> Foresight:
    """Foresee a drain of ``hosts``. ``rows`` of ``report.history``."""
    pauses, sizes = _experience(rows)
    stops = _no_job(job)
    if stops or job.map is None:
        return Foresight((), tuple(stops), (), pauses, sizes)
    wished = {h: replace(job.admins.get(h, Admin(h)), draining=True) for h in hosts}
    asked = replace(job, admins={**job.admins, **wished})
    slots = [i for i, s in enumerate(job.map.seats) if s.host in hosts]
    first = [i for i, s in enumerate(job.map.seats) if s.host not in hosts and (job.trouble(i) or not job.alive(s))]
    plan = planner.plan_moves(asked, [*first, *slots], to)
    moves = tuple(m for m in plan.moves if m.slot in slots)
    blockers = [*_hosts(job, hosts), *_shortage(job, asked, slots, moves, to)]
    return Foresight(moves, tuple(blockers), tuple(_notes(job, hosts, slots, first)), pauses, sizes)


UNMOVABLE = "the workers have not reached run.steps yet; a script that never does cannot be moved, only restarted"


def movable(job: Job) -> bool:
    """Whether its ranks can be moved, as far as the coordinator has told or the claims show."""
    return job.movable or job.told.movable


def _no_job(job: Job) -> list[str]:
    if job.end is not None:
        return [f"the job has ended ({job.end.state.value})"]
    if job.map is None:
        return ["the job has no ranks yet"]
    return [] if movable(job) else [UNMOVABLE]


def _hosts(job: Job, hosts: Sequence[Host]) -> list[str]:
    assert job.map is not None
    found = []
    for host in hosts:
        slot = job.map.slot_of_host(host)
        if job.draining(host):
            found.append(f"{host} is drained, or being drained, already")
        elif slot is not None and (not job.alive(job.map.seats[slot]) or job.trouble(slot)):
            found.append(f"{host} has failed: its ranks are replaced, not drained")
    return found


def nearness(job: Job, move: Move) -> str:
    """The finest level of places that leaver and joiner share; empty when they are not near, or nobody knows."""
    labels = [job.members[s.host].value.labels if s.host in job.members else {} for s in (move.leaver, move.joiner)]
    return placement.near(*map(placement.place_of, labels))


def _shortage(job: Job, asked: Job, slots: Sequence[int], moves: Sequence[Move], to: str) -> list[str]:
    lacking = min(len(slots), planner.MAX_MOVES) - len(moves)
    if lacking <= 0:
        return []
    warm = planner.standbys(asked)
    if to and not any(m.host == to for m in warm):
        return [f"{to} is no warm, free standby"]
    cold = [m.host for m in planner.standbys(asked, warm_only=False) if not m.warm]
    cordoned = [m.host for m in planner.standbys(replace(job, admins={}), warm_only=False) if job.cordoned(m.host)]
    hints = [f"{', '.join(cold)} still warming up"] if cold else []
    hints += [f"{', '.join(cordoned)} cordoned"] if cordoned else []
    text = f"{many(len(warm), 'warm standby')} for {len(slots)} leaving"
    return [f"{text} ({'; '.join(hints)})" if hints else text]


def _notes(job: Job, hosts: Sequence[Host], slots: Sequence[int], first: Sequence[int]) -> list[str]:
    assert job.map is not None
    notes = [f"{h} holds no ranks: it is free at once" for h in hosts if job.map.slot_of_host(h) is None]
    warning = storehosts.warning(job, hosts)
    if warning:
        notes.append(warning)
    if job.open_migration:
        notes.append(f"migration {job.open_migration.id} is going on and is finished first")
    if first:
        notes.append(f"what has failed is replaced first: slot {', '.join(map(str, first))}")
    if len(slots) > planner.MAX_MOVES:
        notes.append(f"in {-(-len(slots) // planner.MAX_MOVES)} migrations of at most {planner.MAX_MOVES} nodes")
    return notes


def _experience(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[float, float] | None, int | None]:
    drains = [r for r in rows if r["cause"] == Kind.DRAIN.value and r["pause_s"] is not None]
    pauses = [r["pause_s"] for r in drains]
    sizes = [r["bytes"] / len(r["ranks"]) for r in rows if r["bytes"] and r["ranks"]]
    return (min(pauses), max(pauses)) if pauses else None, int(statistics.median(sizes)) if sizes else None
