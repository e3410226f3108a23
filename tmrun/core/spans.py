"""A switch of epochs as spans: each worker's own account of its phases, laid side by side. For Perfetto, chrome://tracing, or line by line.

Workers measure durations on clocks of their own and nobody compares clocks, so the tracks are aligned by what they have in common: the
moment when the joiners have their state and the next step begins is the same on all. Time 0 is the first sign of trouble that any worker
saw.
May not know: files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tmrun.core.model import RankMap, Timing

ORDER = {"stayer": ("detect", "wait", "switch", "state"), "joiner": ("bind", "comm", "switch", "state")}
"""Phases of a worker's account, as they follow each other."""
MEANING = {
    "detect": "from the first sign of trouble to the notice of the migration",
    "wait": "parked, until the commit",
    "bind": "the joiner takes its rank",
    "comm": "new communicators are built",
    "switch": "the new communicators are installed",
    "state": "the joiner's state is sent or received",
    "redo": "the next step, or the step again",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one worker; seconds since the first sign of trouble."""

    name: str
    epoch: int
    node: str
    rank: int
    role: str
    start_s: float
    duration_s: float
    bytes: int = 0


def spans(current: RankMap, timings: Sequence[Timing], nproc: int) -> list[Span]:
    """All spans of one epoch, by rank and start."""
    if not timings:
        return []
    before = max(_before(t) for t in timings)
    return [span for t in sorted(timings, key=lambda t: t.rank) for span in _of_worker(current, t, nproc, before)]


def _before(timing: Timing) -> float:
    """Seconds from the worker's first phase to its next step."""
    return sum(timing.phases.get(name, 0.0) for name in ORDER.get(timing.role, ()))


def _of_worker(current: RankMap, timing: Timing, nproc: int, before: float) -> list[Span]:
    at = before - _before(timing)
    node = current.seats[timing.rank // nproc].host
    found = []
    lengths = [(name, timing.phases.get(name, 0.0)) for name in ORDER.get(timing.role, ())] + [("redo", timing.redo_s)]
    for name, length in lengths:
        if length > 0:
            moved = timing.bytes if name == "state" else 0
            found.append(Span(name, current.epoch, node, timing.rank, timing.role, at, length, moved))
        at += length
    return found


def chrome(found: Sequence[Span], title: str) -> dict[str, Any]:
    """Trace Event Format: a process a node, a thread a rank, times in microseconds."""
    nodes = {node: index for index, node in enumerate(dict.fromkeys(s.node for s in found))}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": index, "tid": 0, "args": {"name": node}} for node, index in nodes.items()
    ]
    for rank, node, role in dict.fromkeys((s.rank, s.node, s.role) for s in found):
        events.append({"name": "thread_name", "ph": "M", "pid": nodes[node], "tid": rank, "args": {"name": f"rank {rank} ({role})"}})
    for s in found:
        arguments = {"what": MEANING[s.name], "role": s.role, **({"bytes": s.bytes} if s.bytes else {})}
        where = {"pid": nodes[s.node], "tid": s.rank}
        events.append(
            {"name": s.name, "cat": s.role, "ph": "X", "ts": s.start_s * 1e6, "dur": s.duration_s * 1e6, **where, "args": arguments}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
