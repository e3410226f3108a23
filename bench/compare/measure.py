"""Figures from step records. Pure: no clock, no files.

Every rank writes a record after each step that counts: (rank, world, step, start, end) on the machine's monotonic clock. A step is
*complete* once all ranks of its world have written it. *Downtime* is the largest gap between the completions of consecutive new steps
after the event, less the median step: for whatever stops the training at once this is the time from the end of the last completed step
before the event to the end of the first new step. A drain stops it later, if at all, hence the largest gap. A step that was complete and
is then computed again is *redone*, and never counts as new.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

BEFORE = 20
"""So many steps before the event tell the median step."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rank did one step; times in seconds on the monotonic clock, ``loss`` exact (``float.hex``)."""

    node: str
    pid: int
    rank: int
    world: int
    step: int
    start: float
    end: float
    loss: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds and counts; ``downtime_s`` None: no new step was completed after the event."""

    step_s: float
    downtime_s: float | None
    excess_s: float | None
    """All time lost from the event to the last new step seen: also what later pauses and slower steps cost."""
    redone: int
    new_steps: int
    world_min: int
    """Smallest world in which a new step was done."""
    slowdown: float | None
    """Median of the last steps seen, as a multiple of the median before the event."""


def completions(records: Iterable[Record]) -> dict[int, float]:
    """Step -> when the last rank of its world had first done it."""
    ranks: dict[int, set[int]] = {}
    found: dict[int, float] = {}
    for record in sorted(records, key=lambda r: r.end):
        if record.step in found:
            continue
        seen = ranks.setdefault(record.step, set())
        seen.add(record.rank)
        if len(seen) >= record.world:
            found[record.step] = record.end
    return found


def new_steps(records: Sequence[Record], event: float) -> list[tuple[int, float]]:
    """(step, completion) of the last step before the event and of each new one after it; empty without a step before it."""
    done = completions(records)
    before = [s for s, at in done.items() if at <= event]
    if not before:
        return []
    last = max(before)
    return [(last, done[last]), *sorted((s, at) for s, at in done.items() if s > last)]


def median_step(records: Sequence[Record], event: float) -> float:
    """Median time between completions before the event."""
    times = sorted(at for at in completions(records).values() if at <= event)[-BEFORE - 1 :]
    return statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0


def figures(records: Sequence[Record], event: float) -> Figures:
    """What an event at ``event`` cost."""
    step = median_step(records, event)
    series = new_steps(records, event)
    gaps = [(b - a, i) for i, ((_, a), (_, b)) in enumerate(pairwise(series))]
    if not gaps:
        return Figures(step, None, None, 0, 0, 0, None)
    gap, index = max(gaps, key=lambda g: g[0])
    last, stopped = series[index]
    redone = {r.step for r in records if r.step <= last and r.end > stopped}
    count = len(series) - 1
    later = [g for g, _ in gaps][-BEFORE:]
    return Figures(
        step_s=step,
        downtime_s=gap - step,
        excess_s=series[-1][1] - series[0][1] - count * step,
        redone=len(redone),
        new_steps=count,
        world_min=min(r.world for r in records if r.step > series[0][0] and r.end > event),
        slowdown=statistics.median(later) / step if step else None,
    )


def settled(records: Sequence[Record], since: float, steps: int) -> bool:
    """Whether so many new steps were completed after ``since``."""
    return len(new_steps(records, since)) > steps


def probe(records: Iterable[Record], every: int = 10) -> dict[int, str]:
    """Rank 0's exact loss at some steps: equal between systems that continue exactly."""
    return {r.step: r.loss for r in records if r.rank == 0 and r.step % every == 0}


def consistent(records: Iterable[Record]) -> bool:
    """Whether every step that a rank did twice had the same loss both times."""
    seen: dict[tuple[int, int], str] = {}
    return all(seen.setdefault((r.rank, r.step), r.loss) == r.loss for r in records)
