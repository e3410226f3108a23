"""The other ways to survive a fault, on the same trace: everybody restarts, or the job goes on smaller. Parameterised, not their code.

    restart   all workers of all nodes start anew from the last checkpoint; on spare hosts if there are some, else on what comes back
    shrink    the job pauses, goes on without the lost nodes (and what they take with them), pauses again when they are back

Each has a ``source`` that says where its figures are from. May not know: tmrun's core, files.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tmrun.sim.costs import Costs
from tmrun.sim.ledger import Ledger, Outcome, Term, outcome
from tmrun.sim.shape import Shape
from tmrun.sim.trace import EXPECTED, Event, Fault


class Family(str, Enum):
    """How a fault is survived."""

    RESTART = "restart"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True)
class Baseline:
    """One strategy, as its file describes it."""

    name: str
    label: str
    source: str
    family: Family
    spares: bool = False
    """It may hold as many spare hosts as tmrun has standbys."""
    cleanup: bool = True
    """A restart pays for the clean-up of the old job ..."""
    reschedule: bool = True
    """... and for a new allocation."""
    store_host_fatal: bool = False
    """Losing the host at position 0 costs clean-up and a new allocation besides."""
    out_s: float = 0.0
    """shrink: the pause when nodes leave."""
    in_s: float = 0.0
    """shrink: the pause when nodes come back."""
    group: bool = False
    """shrink: a lost node takes its whole replica with it."""
    steady: float = 0.0
    """Share by which every step is longer, always."""


@dataclass
class Play:
    """One run of one baseline. ``plan``: what the stopped job still has to go through, as (term, end time)."""

    shape: Shape
    costs: Costs
    how: Baseline
    spares: int
    trace: Sequence[Event]

    now: float = 0.0
    done_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    counts: Counter[str] = field(default_factory=Counter)
    plan: list[tuple[Term, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hosts = self.shape.nodes + (self.spares if self.how.spares else 0)
        self.back: list[tuple[float, int]] = []
        """Heap: when which position is there again."""
        self.out: set[int] = set()
        self.shrunk: set[int] = set()
        self.slow: dict[int, float] = {}
        """Straggler -> when somebody takes it out."""
        self.active = set(range(self.shape.nodes))
        feared = sum(e.kind not in EXPECTED or e.kind is Fault.ALARM for e in self.trace if self._counts_as_restart(e))
        self.every_s = self.costs.checkpoint.interval_s(feared, self.shape.horizon_s)

    def _counts_as_restart(self, event: Event) -> bool:
        return self.how.family is Family.RESTART or event.kind is Fault.SOFTWARE

    def play(self) -> Outcome:
        """Simulate to the horizon."""
        end = self.shape.horizon_s
        for event in self.trace:
            if event.time_s >= end:
                break
            self._pass_to(event.time_s)
            self._strike(event)
        self._pass_to(end)
        spare = (self.hosts - self.shape.nodes) * self.shape.nproc
        return outcome(self.how.name, self.how.label, self.how.source, self.shape.gpus, spare, end, self.ledger, dict(self.counts))

    # -- time
    def _pass_to(self, when: float) -> None:
        """Let time pass, in pieces at whose ends something changes."""
        while self.now < when:
            until = min(when, self.plan[0][1] if self.plan else when, self.back[0][0] if self.back else when, *self.slow.values())
            self._spend(max(until, self.now))
            while self.plan and self.plan[0][1] <= self.now:
                self.plan.pop(0)
            while self.back and self.back[0][0] <= self.now:
                self._returned(heapq.heappop(self.back)[1])
            for host in [h for h, t in self.slow.items() if t <= self.now]:
                del self.slow[host]
                self._interrupt((host,), Fault.DRAIN, self.costs.restart.reschedule_s, healthy=False)

    def _spend(self, until: float) -> None:
        seconds = until - self.now
        if self.plan:
            self.ledger.book(self.plan[0][0], self.now, until)
        elif seconds > 0:
            self._train(seconds, until)
        self.now = until

    def _train(self, seconds: float, until: float) -> None:
        """At a smaller size the share of the missing nodes is degraded; so is what a method or a straggler costs each step."""
        present = 1 - min(1.0, self._missing() / self.shape.nodes)
        checkpoint = self.costs.checkpoint.write_s / self.every_s
        drag = self.how.steady + (self.costs.slowdown if self.slow else 0.0)
        full = seconds * present / (1 + checkpoint + drag)
        self.ledger.work(full, checkpoint=full * checkpoint, degraded=seconds - full * (1 + checkpoint))
        self.done_s += full

    def _missing(self) -> int:
        if not self.how.group:
            return len(self.shrunk)
        width = self.shape.nodes // self.shape.replicas
        return width * len({min(h // width, self.shape.replicas - 1) for h in self.shrunk})

    # -- faults
    def _strike(self, event: Event) -> None:
        self.counts["faults"] += 1
        hosts = tuple(h for h in event.hosts if h < self.hosts and h not in self.out)
        struck = tuple(h for h in hosts if h in self.active)
        if event.kind is Fault.SOFTWARE:
            if struck:
                self._restart_all(self.costs.detect.exit_s, Term.RESTART, fresh=False)
            return
        if event.kind is Fault.SLOW:
            self.slow.update({h: self.now + self.costs.detect.slow_s for h in struck if not self.plan})
            return
        for h in hosts:
            if h not in struck:
                self._away(h, event.back_s)
        if struck:
            self._interrupt(struck, event.kind, event.back_s, healthy=event.kind is Fault.ALARM)

    def _away(self, host: int, back_s: float) -> None:
        self.out.add(host)
        self.active.discard(host)
        self.slow.pop(host, None)
        heapq.heappush(self.back, (self.now + back_s, host))

    def _interrupt(self, hosts: Sequence[int], kind: Fault, back_s: float, *, healthy: bool) -> None:
        self.counts["nodes lost"] += len(hosts)
        planned = kind is Fault.DRAIN and self.how.family is Family.RESTART
        for host in hosts if not planned else ():  # a planned one leaves when the machine that takes its place is there
            self._away(host, back_s)
        detect = self._detect_s(kind)
        if self.how.family is Family.SHRINK:
            self.shrunk |= set(hosts)
            if kind not in EXPECTED and not self.plan:  # the step that was running is done again
                begun = self.done_s % self.costs.step_s
                self.ledger.lose(begun)
                self.done_s -= begun
            self._queue([(Term.DETECT, detect), (Term.ALARM if healthy else Term.SWITCH, self.how.out_s)])
            if self._missing() >= self.shape.nodes:  # no whole replica is left
                self._restart_all(0.0, Term.RESTART, fresh=True)
            return
        self._restart_all(detect, Term.ALARM if healthy else Term.RESTART, fresh=True, planned=planned, zero=0 in hosts)

    def _detect_s(self, kind: Fault) -> float:
        d = self.costs.detect
        return {Fault.HANG: d.watchdog_s, Fault.VANISH: d.peer_vanish_s, Fault.EXIT: d.exit_s, Fault.ALARM: d.exit_s}.get(kind, 0.0)

    def _restart_all(self, detect_s: float, term: Term, *, fresh: bool, planned: bool = False, zero: bool = False) -> None:
        """Everybody starts anew. ``fresh``: lost hosts must be replaced; ``planned``: a checkpoint is written first, nothing is redone."""
        self.counts["restarts"] += 1
        if planned and not self.plan:
            stretch = [(Term.CHECKPOINT, self.costs.checkpoint.write_s)]
        else:
            kept = int(self.done_s / self.every_s + 1e-9) * self.every_s
            self.ledger.lose(self.done_s - kept)
            self.done_s, stretch = kept, [(Term.DETECT, detect_s)]
        r = self.costs.restart
        again = zero and self.how.store_host_fatal
        lacking = self._seat_spares() if fresh else 0
        anew = again or (self.how.reschedule and (lacking > 0 or planned))
        self.plan = []
        self._queue([*stretch, (term, (r.cleanup_s if self.how.cleanup or again else 0.0) + (r.reschedule_s if anew else 0.0))])
        if lacking:
            free = sorted(t for t, _ in self.back)[lacking - 1]
            self._queue([(Term.REFILL, free - (self.plan[-1][1] if self.plan else self.now))])
        self._queue([(term, self.costs.framework_s(self.shape.gpus))])
        self.shrunk.clear()

    def _seat_spares(self) -> int:
        """Spares take the places of lost hosts; how many places stay empty for now."""
        free = [h for h in range(self.hosts) if h not in self.active and h not in self.out]
        while free and len(self.active) < self.shape.nodes:
            self.active.add(free.pop(0))
        return self.shape.nodes - len(self.active)

    def _queue(self, stretch: Sequence[tuple[Term, float]]) -> None:
        for term, seconds in stretch:
            if seconds > 0:
                start = max(self.plan[-1][1] if self.plan else self.now, self.now)
                self.plan.append((term, start + seconds))

    def _returned(self, host: int) -> None:
        self.out.discard(host)
        if host in self.shrunk:
            self.shrunk.discard(host)
            self.active.add(host)
            self._queue([(Term.SWITCH, self.how.in_s)])
        elif len(self.active) < self.shape.nodes:
            self.active.add(host)
