"""How many standbys pay off: what each one costs against the waiting that it saves. Closed form, so that hundreds of cases are instant.

The pool is a queue: machines that were lost come back after the refill time (swap + warm-up), and the number of them under way is compound
Poisson (racks are lost as a whole). A fault that finds too few standbys stops everybody until enough are back. The pauses of the moves
themselves, detection, redo and restarts do not depend on the pool and are left out; ``simulate`` has them. May not know: files, output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tmrun.sim.costs import Costs
from tmrun.sim.failures import FailureModel
from tmrun.sim.formulas import WEEK_H, in_refill
from tmrun.sim.shape import Shape
from tmrun.sim.trace import EXPECTED, Fault

MOST = 256
"""Standbys that are tried."""
TAIL = 64
"""Machines under way that are considered beyond the pool."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Losses of ``batch`` machines at once, ``rate_h`` times an hour; each is replaced ``refill_h`` later.

    ``stops``: the job cannot go on without a joiner (a drain's leaver works until one is there).
    """

    batch: int
    rate_h: float
    refill_h: float
    stops: bool


@dataclass(frozen=True, slots=True)
class Point:
    """One pool size. GPU-hours and counts a week."""

    standby: int
    held: float
    """What the pool costs."""
    waited: float
    """What all active GPUs lose waiting for a joiner."""
    stops: float
    """How often a fault finds too few standbys."""

    @property
    def total(self) -> float:
        """What is to be small."""
        return self.held + self.waited


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the sensitivity: what was changed, what is best then, and what today's best would cost there."""

    what: str
    best: Point
    kept: Point


def flows(shape: Shape, costs: Costs, model: FailureModel) -> list[Flow]:
    """The losses that this job has to expect."""
    per_h = shape.nodes * model.rate(shape.nodes) / 24
    weights = sum(c.weight for c in model.causes)
    alone = per_h * (1 - sum(d.share for d in model.domains))
    warm_h, back = costs.standby.warm_s / 3600, model.back
    swap_s = back.swap_s * math.exp(back.swap_sigma**2 / 2)
    found = []
    for cause in model.causes:
        if cause.kind is not Fault.SOFTWARE:
            refill = (cause.retry * back.retry_s + (1 - cause.retry) * swap_s) / 3600 + warm_h
            rate = alone * (1 + model.bursts.share) * cause.weight / weights
            found.append(Flow(1, rate, refill, cause.kind not in EXPECTED))
    for domain in model.domains:
        batch = min(domain.nodes, shape.nodes)
        found.append(Flow(batch, per_h * domain.share, domain.back_s / 3600 + warm_h, True))
    found.append(Flow(1, alone / model.planned.unplanned_for_each, model.planned.back_s / 3600 + warm_h, False))
    found.append(Flow(1, alone * model.alarms_per_fault, back.retry_s / 3600 + warm_h, False))
    return [f for f in found if f.rate_h > 0]


def point(shape: Shape, losses: Sequence[Flow], standby: int) -> Point:
    """What a pool of so many costs and saves."""
    return next(points(shape, losses, (standby,)))


def points(shape: Shape, losses: Sequence[Flow], standbys: Iterable[int]) -> Iterator[Point]:
    """One a pool size."""
    wanted = tuple(standbys)
    under_way: dict[int, float] = {}
    for flow in losses:
        under_way[flow.batch] = under_way.get(flow.batch, 0.0) + flow.rate_h * flow.refill_h
    chance = in_refill(under_way, 1.0, max(MOST, *wanted) + TAIL)
    chance[-1] += max(0.0, 1 - sum(chance))
    machines = sum(f.batch * f.rate_h for f in losses)
    mean_h = sum(f.batch * f.rate_h * f.refill_h for f in losses) / machines if machines else 0.0
    for k in wanted:
        waited_h = stops = 0.0
        for batch in under_way:
            stopping = [f for f in losses if f.batch == batch and f.stops]
            found, early, late = _lacking(batch, k, chance)
            stops += found * sum(f.rate_h for f in stopping)
            waited_h += early * mean_h * sum(f.rate_h for f in stopping) + late * sum(f.rate_h * f.refill_h for f in stopping)
        yield Point(k, WEEK_H * k * shape.nproc, WEEK_H * waited_h * shape.gpus, WEEK_H * stops)


def _lacking(batch: int, k: int, chance: Sequence[float]) -> tuple[float, float, float]:
    """For a loss of ``batch`` machines: P(too few standbys), and how long the wait is, in mean refill times and in own ones.

    With n machines under way and m too few, the wait ends when the m-th is back: those that were under way before are uniformly far in
    their refill (order statistics: m / (n + 1) of it), the new ones take all of theirs.
    """
    found = early = late = 0.0
    for n in range(max(0, k - batch + 1), len(chance)):
        lacking = batch - max(0, k - n)
        found += chance[n]
        if lacking <= n:
            early += chance[n] * lacking / (n + 1)
        else:
            late += chance[n]
    return found, early, late


def best(shape: Shape, losses: Sequence[Flow]) -> Point:
    """The pool with the least waste; of equals the smallest."""
    return min(points(shape, losses, range(min(MOST, shape.nodes) + 1)), key=lambda p: (p.total, p.standby))


def sensitivity(shape: Shape, costs: Costs, model: FailureModel) -> list[Case]:
    """What is best if an assumption is wrong."""
    now = best(shape, flows(shape, costs, model)).standby

    def case(what: str, c: Costs, m: FailureModel) -> Case:
        losses = flows(shape, c, m)
        return Case(what, best(shape, losses), point(shape, losses, now))

    found = [case(f"MTTF x {x:g} ({model.mttf_h(shape.nodes) * x:.3g} h)", costs, model.scaled(1 / x)) for x in (0.5, 1, 2)]
    found += [case(f"refill x {x:g}", _refill(costs, x), _back(model, x)) for x in (0.5, 2, 4, 24)]
    racks = sum(d.share for d in model.domains)
    found.append(case("no rack or switch is ever lost whole", costs, replace(model, domains=())))
    if racks:
        doubled = tuple(replace(d, share=min(1.0, 2 * d.share)) for d in model.domains)
        if sum(d.share for d in doubled) <= 1:
            found.append(case(f"rack and switch share x 2 ({2 * racks:.0%})", costs, replace(model, domains=doubled)))
    return found


def _refill(costs: Costs, factor: float) -> Costs:
    return replace(costs, standby=replace(costs.standby, warm_s=costs.standby.warm_s * factor))


def _back(model: FailureModel, factor: float) -> FailureModel:
    b, p = model.back, model.planned
    return replace(
        model,
        back=replace(b, retry_s=b.retry_s * factor, swap_s=b.swap_s * factor),
        planned=replace(p, back_s=p.back_s * factor),
        domains=tuple(replace(d, back_s=d.back_s * factor) for d in model.domains),
    )


def pays_from(shape: Shape, costs: Costs, model: FailureModel) -> int | None:
    """The smallest job, in nodes (powers of two), for which one standby or more is better than none; None: no size up to 65,536 nodes."""
    nodes = 1
    while nodes < 65_536:
        nodes *= 2
        wide = replace(shape, nodes=min(nodes, 16_384), replicas=min(shape.replicas, nodes))
        if best(wide, flows(wide, costs, model)).standby > 0:
            return nodes
    return None


@dataclass(frozen=True, slots=True)
class Wish:
    """What ``--standby TEXT`` means for this job."""

    text: str
    at: Point
    none: Point
    best: Point
    domains: tuple[tuple[str, int, bool], ...]
    """(failure domain, its nodes, whether a full pool covers its loss)."""
    share: float
    """Of everything that is paid."""


def explain(text: str, count: int, shape: Shape, costs: Costs, model: FailureModel) -> Wish:
    """What the pool of ``count`` nodes does that ``text`` asks for."""
    losses = flows(shape, costs, model)
    covered = tuple((d.name, d.nodes, count >= d.nodes) for d in model.domains)
    share = count / (shape.nodes + count)
    return Wish(text, point(shape, losses, count), point(shape, losses, 0), best(shape, losses), covered, share)
