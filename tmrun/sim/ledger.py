"""Where the GPU-hours of a simulated job went. Every second of every GPU is in exactly one term, so the terms sum to what was paid.

May not know: why a term was chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

MAX_SPANS = 20_000
"""Of the timeline; later ones are counted in the terms only."""
HOUR_S = 3600.0


class Term(str, Enum):
    """What the GPUs did."""

    USEFUL = "useful"
    """New steps, at full speed."""
    CHECKPOINT = "checkpoint"
    """Training blocked by writing to storage."""
    SNAPSHOT = "snapshot"
    """Training blocked by copying to a partner's memory."""
    DETECT = "detect"
    """From the fault until somebody knows it."""
    DECIDE = "decide"
    """The protocol: elections, the breaker, the wait for a host that is only cut off."""
    SWITCH = "switch"
    """Binding the joiner, communicators, state: the paper's downtime."""
    REDO = "redo"
    """Work that was done before and had to be done again."""
    REFILL = "refill"
    """Everybody waits because no standby was warm."""
    RESTART = "restart"
    """All workers start anew."""
    DEGRADED = "degraded"
    """Training at less than full speed: stragglers, a shrunken world, what a method costs each step."""
    ALARM = "false alarms"
    """All that replacing healthy hosts cost."""
    STANDBY = "standby"
    """GPUs held in reserve."""


SEEN_BY_THE_PAPER = (Term.SWITCH, Term.STANDBY)
"""What the paper's projection counts of a system that moves ranks."""


@dataclass(frozen=True, slots=True)
class Span:
    """Training did not go on at full speed from ``start_s`` to ``end_s``."""

    start_s: float
    end_s: float
    term: Term


@dataclass(slots=True)
class Ledger:
    """``seconds``: of the whole job (all active GPUs together) by term."""

    seconds: dict[Term, float] = field(default_factory=lambda: dict.fromkeys(Term, 0.0))
    spans: list[Span] = field(default_factory=list)

    def book(self, term: Term, start_s: float, end_s: float) -> None:
        """The active GPUs spent this time so."""
        if end_s <= start_s:
            return
        self.seconds[term] += end_s - start_s
        last = self.spans[-1] if self.spans else None
        if last is not None and last.term is term and last.end_s == start_s:
            self.spans[-1] = Span(last.start_s, end_s, term)
        elif len(self.spans) < MAX_SPANS:
            self.spans.append(Span(start_s, end_s, term))

    def work(self, useful_s: float, **besides: float) -> None:
        """A stretch of training: useful time, and what it cost besides, by the term's name in lower case."""
        self.seconds[Term.USEFUL] += useful_s
        for name, seconds in besides.items():
            self.seconds[Term[name.upper()]] += seconds

    def lose(self, seconds: float) -> None:
        """Work that was booked as useful is done again."""
        self.seconds[Term.USEFUL] -= seconds
        self.seconds[Term.REDO] += seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """One strategy's run. GPU-hours by term; ``counts`` of what happened."""

    strategy: str
    label: str
    source: str
    gpus: int
    standby_gpus: int
    wall_s: float
    gpu_hours: dict[Term, float]
    counts: dict[str, int]
    spans: tuple[Span, ...] = ()
    story: tuple[tuple[float, str], ...] = ()
    """Faults, and when the coordinator said what (tmrun only; the last lines of a long run)."""

    @property
    def pool(self) -> bool:
        """tmrun as it is, with so many standbys: nothing switched off."""
        return self.strategy.removeprefix("tmrun-").isdecimal()

    @property
    def seen_by_the_paper(self) -> float:
        """Share of the waste that the paper's projection would count."""
        return sum(self.gpu_hours[t] for t in SEEN_BY_THE_PAPER) / self.wasted if self.wasted else 0.0

    @property
    def paid(self) -> float:
        """GPU-hours held, standbys included."""
        return (self.gpus + self.standby_gpus) * self.wall_s / HOUR_S

    @property
    def wasted(self) -> float:
        """GPU-hours that did nothing new."""
        return self.paid - self.gpu_hours[Term.USEFUL]

    @property
    def waste_share(self) -> float:
        """Of what was paid."""
        return self.wasted / self.paid

    @property
    def week_wasted(self) -> float:
        """GPU-hours a week."""
        return self.wasted * 168 * HOUR_S / self.wall_s

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time of the active GPUs, of the wall time."""
        return self.gpu_hours[Term.USEFUL] / (self.gpus * self.wall_s / HOUR_S)


def outcome(
    name: str,
    label: str,
    source: str,
    gpus: int,
    standby_gpus: int,
    wall_s: float,
    ledger: Ledger,
    counts: dict[str, int],
    story: tuple[tuple[float, str], ...] = (),
) -> Outcome:
    """Close the books; they must balance."""
    booked = sum(ledger.seconds.values())
    assert math.isclose(booked, wall_s, rel_tol=1e-6), (name, booked, wall_s)
    hours = {term: seconds * gpus / HOUR_S for term, seconds in ledger.seconds.items()}
    hours[Term.STANDBY] = standby_gpus * wall_s / HOUR_S
    return Outcome(name, label, source, gpus, standby_gpus, wall_s, hours, counts, tuple(ledger.spans), story)
