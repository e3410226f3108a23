"""Draw faults from published statistics: rates by job size, causes, lemon nodes, racks and switches, bursts, maintenance, false alarms.

Each host has random numbers of its own, so a job with more standbys lives through the same faults, and those of its extra hosts besides.
May not know: files, how faults are survived.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from tmrun.core.errors import UsageError
from tmrun.sim.trace import Event, Fault

DAY_S = 86_400.0
GPUS_A_NODE = 8
"""The nodes that the published rates count."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause: its weight among the unplanned ones, how it shows, and whether a retry on the same machine cures it."""

    name: str
    weight: float
    kind: Fault
    retry: float = 0.0
    """Share of these faults after which the machine is well again at once."""


@dataclass(frozen=True, slots=True)
class MeasuredMttf:
    """A published point: a job of so many GPUs fails every so many hours."""

    gpus: int
    hours: float


@dataclass(frozen=True, slots=True)
class Domain:
    """A failure domain: ``nodes`` hosts that are lost together; ``share`` of all unplanned faults strike one as a whole."""

    name: str
    nodes: int
    share: float
    back_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Lemons:
    """``nodes``: share of hosts that are lemons; ``faults``: share of the faults that those hosts have."""

    nodes: float = 0.0
    faults: float = 0.0


@dataclass(frozen=True, slots=True)
class Bursts:
    """``share`` of the faults are followed by another one, on a random other host, within ``within_s``."""

    share: float = 0.0
    within_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Planned:
    """Maintenance. ``unplanned_for_each``: Llama 3 had 8.9 unplanned interruptions for each planned one.

    ``back_s``: from the notice until the machine that takes the place is there.
    """

    unplanned_for_each: float = 8.9
    back_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Back:
    """How long a position stays empty, in seconds: after a fault that a retry cures; after a swap (median, spread of its logarithm)."""

    retry_s: float = 60.0
    swap_s: float = 120.0
    swap_sigma: float = 0.5


@dataclass(frozen=True, slots=True)
class FailureModel:
    """``per_node_day``: unplanned faults of an 8-GPU node a day, from ``follows_from_gpus`` on; below that the measured points count."""

    name: str
    source: str
    per_node_day: float
    causes: tuple[Cause, ...]
    measured: tuple[MeasuredMttf, ...] = ()
    domains: tuple[Domain, ...] = ()
    lemons: Lemons = Lemons()
    bursts: Bursts = Bursts()
    planned: Planned = Planned()
    back: Back = Back()
    alarms_per_fault: float = 0.0
    """Healthy hosts that are taken out by mistake, for each unplanned fault."""

    def check(self, where: str) -> FailureModel:
        """Relations between the values. Raises UsageError."""
        weight, shares = sum(c.weight for c in self.causes), sum(d.share for d in self.domains)
        for wrong, what in (
            (not self.causes or weight <= 0, "causes: no weights; add at least one cause with weight > 0"),
            (shares > 1, f"domains: their shares sum to {shares:g}; they are shares of all faults, at most 1 together"),
            (any(d.nodes < 1 for d in self.domains), "domains: nodes must be at least 1"),
            (any(c.retry > 1 for c in self.causes), "causes: retry is a share, at most 1"),
            (self.bursts.share > 1, "bursts.share is a share, at most 1"),
            (self.lemons.nodes >= 1 or self.lemons.faults >= 1, "lemons: shares must be below 1"),
            ((self.lemons.nodes > 0) != (self.lemons.faults > 0), "lemons: give both nodes and faults, or neither"),
            (self.planned.unplanned_for_each <= 0, "planned.unplanned_for_each must be above 0 (1e9 for no maintenance)"),
            (any(m.gpus < 1 or m.hours <= 0 for m in self.measured), "measured: gpus and hours must be above 0"),
        ):
            if wrong:
                raise UsageError(f"{where}: {what}")
        return self

    def rate(self, nodes: int) -> float:
        """Unplanned faults of one node a day in a job of so many nodes: measured points, log-linear between, the plain rate beyond."""
        points = sorted((m.gpus / GPUS_A_NODE, DAY_S / 3600 / (m.gpus / GPUS_A_NODE * m.hours)) for m in self.measured)
        if not points or nodes >= points[-1][0]:
            return self.per_node_day
        if nodes <= points[0][0]:
            return points[0][1]
        for (n0, r0), (n1, r1) in pairwise(points):
            if nodes <= n1:
                part = math.log(nodes / n0) / math.log(n1 / n0)
                return r0 * math.exp(part * math.log(r1 / r0))
        raise AssertionError(nodes)

    def mttf_h(self, nodes: int) -> float:
        """Mean hours between unplanned faults of a job of so many nodes."""
        rate = nodes * self.rate(nodes)
        return 24.0 / rate if rate else math.inf

    def scaled(self, factor: float) -> FailureModel:
        """The same with all fault rates times ``factor``."""
        measured = tuple(MeasuredMttf(m.gpus, m.hours / factor) for m in self.measured)
        return replace(self, per_node_day=self.per_node_day * factor, measured=measured)


def draw(model: FailureModel, nodes: int, hosts: int, horizon_s: float, seed: int) -> tuple[Event, ...]:
    """The faults of ``hosts`` hosts, of which ``nodes`` train, until ``horizon_s``; the same for the same seed."""
    rate = model.rate(nodes) / DAY_S
    alone = rate * (1 - sum(d.share for d in model.domains))
    events: list[Event] = []
    for host in range(hosts):
        events += _of_host(model, host, alone, horizon_s, seed, hosts)
    for domain in model.domains:
        for first in range(0, hosts, domain.nodes):
            rng = random.Random(f"{seed}/{domain.name}/{first}")
            struck = tuple(range(first, min(first + domain.nodes, hosts)))
            events += [
                Event(t, struck, Fault.VANISH, f"{domain.name} lost", domain.back_s)
                for t in _times(rng, rate * domain.share * len(struck), horizon_s)
            ]
    return tuple(sorted(events))


def _of_host(model: FailureModel, host: int, rate: float, horizon_s: float, seed: int, hosts: int) -> Iterator[Event]:
    rng = random.Random(f"{seed}/host/{host}")
    names, weights = model.causes, [c.weight for c in model.causes]
    own = rate * _lemon(model.lemons, rng.random())
    for t in _times(rng, own, horizon_s):
        cause = rng.choices(names, weights)[0]
        yield Event(t, (host,), cause.kind, cause.name, _back_s(model.back, cause, rng))
        # drawn always, so that the number of hosts does not shift what follows
        luck, other, later, back_s = (
            rng.random(),
            int(rng.random() * hosts),
            t + rng.random() * model.bursts.within_s,
            _back_s(model.back, cause, rng),
        )
        if luck < model.bursts.share and other != host and later < horizon_s:
            yield Event(later, (other,), cause.kind, f"{cause.name} (burst)", back_s)
    rng = random.Random(f"{seed}/planned/{host}")
    for t in _times(rng, rate / model.planned.unplanned_for_each, horizon_s):
        yield Event(t, (host,), Fault.DRAIN, "maintenance", model.planned.back_s)
    rng = random.Random(f"{seed}/alarm/{host}")
    for t in _times(rng, rate * model.alarms_per_fault, horizon_s):
        yield Event(t, (host,), Fault.ALARM, "false positive", model.back.retry_s)


def _lemon(lemons: Lemons, luck: float) -> float:
    """How much more often than the average this host fails; the average over all hosts is 1."""
    if not lemons.nodes:
        return 1.0
    return lemons.faults / lemons.nodes if luck < lemons.nodes else (1 - lemons.faults) / (1 - lemons.nodes)


def _back_s(back: Back, cause: Cause, rng: random.Random) -> float:
    cured, spread = rng.random() < cause.retry, rng.gauss(0.0, back.swap_sigma)
    return back.retry_s if cured else back.swap_s * math.exp(spread)


def _times(rng: random.Random, rate: float, horizon_s: float) -> Iterator[float]:
    """A Poisson process."""
    if rate <= 0:
        return
    t = rng.expovariate(rate)
    while t < horizon_s:
        yield t
        t += rng.expovariate(rate)
