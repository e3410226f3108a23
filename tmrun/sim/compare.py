"""Run strategies side by side on one trace. May not know: files, how results are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tmrun.core.errors import UsageError
from tmrun.core.plural import many
from tmrun.sim.baselines import Baseline, Family, Play
from tmrun.sim.costs import Costs
from tmrun.sim.failures import FailureModel, draw
from tmrun.sim.ledger import Outcome
from tmrun.sim.mover import Mover
from tmrun.sim.scene import Options
from tmrun.sim.shape import Shape
from tmrun.sim.trace import Event

NO_OPTIONS = Options()
MAX_FAULTS = 200_000
"""A simulated week of the largest jobs has some hundreds."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A baseline, or tmrun with ``options``."""

    name: str
    label: str
    baseline: Baseline | None = None
    options: Options = NO_OPTIONS


@dataclass(frozen=True, slots=True)
class Strategies:
    """The document in ``configs/simulate/strategies.toml``."""

    strategy: tuple[Baseline, ...]

    def check(self, where: str) -> Strategies:
        """Raises UsageError."""
        names = [s.name for s in self.strategy]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice or not names:
            raise UsageError(f"{where}: " + (f"two strategies are called {twice!r}" if twice else "no [[strategy]] in it"))
        reserved = next((n for n in names if n.startswith("tmrun")), None)
        if reserved:
            raise UsageError(f"{where}: {reserved!r}: names that begin with tmrun are tmrun's own; choose another")
        return self


def pools(standbys: Sequence[int]) -> list[Strategy]:
    """tmrun with each number of standbys."""
    return [Strategy(f"tmrun-{k}", f"tmrun, {many(k, 'standby')}", None, Options(k)) for k in sorted(set(standbys))]


def moving(standbys: Sequence[int], shape: Shape) -> list[Strategy]:
    """The pools; with the largest, also without placement; for sharded jobs also without snapshots."""
    found, most = pools(standbys), max(standbys)
    if most:
        found.append(Strategy(f"tmrun-{most}-unplaced", f"tmrun, {most}, no placement", None, Options(most, placement=False)))
    if shape.replicas == 1:
        found.append(Strategy(f"tmrun-{most}-bare", f"tmrun, {most}, no snapshots", None, Options(most, snapshots=False)))
    return found


def standing(document: Strategies) -> list[Strategy]:
    """The baselines."""
    return [Strategy(b.name, b.label, b) for b in document.strategy]


def choose(strategies: Sequence[Strategy], wanted: str) -> list[Strategy]:
    """Those that a comma-separated list names (``tmrun`` is every tmrun one); empty: all. Raises UsageError."""
    if not wanted:
        return list(strategies)
    found: list[Strategy] = []
    for name in (w.strip() for w in wanted.split(",")):
        these = [s for s in strategies if s.name == name or (name == "tmrun" and s.baseline is None)]
        if not these:
            raise UsageError(f"--strategies {name!r}: no such strategy; known: tmrun, {', '.join(s.name for s in strategies)}")
        found += [s for s in these if s not in found]
    return found


def faults(model: FailureModel, shape: Shape, strategies: Sequence[Strategy]) -> tuple[Event, ...]:
    """The trace that all of them live through, drawn for the widest. Raises UsageError when it would be endless."""
    expected = shape.nodes * model.rate(shape.nodes) * shape.days
    if expected > MAX_FAULTS:
        short = "give fewer days, fewer nodes or a longer mean time to failure"
        raise UsageError(
            f"about {expected:,.0f} faults in {many(shape.days, 'day')}, more than the {MAX_FAULTS:,} that are simulated: {short}"
        )
    return draw(model, shape.nodes, shape.nodes + _widest(strategies), shape.horizon_s, shape.seed)


def _widest(strategies: Sequence[Strategy]) -> int:
    return max((s.options.standby for s in strategies if s.baseline is None), default=0)


def left_out(trace: Sequence[Event], shape: Shape, strategies: Sequence[Strategy]) -> list[str]:
    """What of a given trace does not happen to this job, in words."""
    hosts = shape.nodes + _widest(strategies)
    late = sum(e.time_s >= shape.horizon_s for e in trace)
    beyond = sum(e.time_s < shape.horizon_s and min(e.hosts) >= hosts for e in trace)
    partly = sum(e.time_s < shape.horizon_s and min(e.hosts) < hosts <= max(e.hosts) for e in trace)
    reasons = (
        (late, f"later than the simulated {many(shape.days, 'day')}"),
        (beyond, f"only at positions that the job does not have (it has 0-{hosts - 1}: nodes and standbys)"),
        (partly, f"partly at such positions (it has 0-{hosts - 1})"),
    )
    return [f"{count} of the trace's {many(len(trace), 'fault')}: {why}; left out" for count, why in reasons if count]


def run(
    strategies: Sequence[Strategy], shape: Shape, costs: Costs, trace: Sequence[Event], say: Callable[[str], None] = lambda _: None
) -> list[Outcome]:
    """One outcome a strategy, in order."""
    spares = _widest(strategies)
    outcomes = []
    for s in strategies:
        say(s.label)
        if s.baseline is not None:
            outcomes.append(Play(shape, costs, s.baseline, spares if s.baseline.family is Family.RESTART else 0, trace).play())
        else:
            mover = Mover(shape, costs, s.options, trace, s.name, s.label)
            outcomes.append(mover.play(lambda day, label=s.label: say(f"{label}, day {day} of {shape.days:g}")))  # type: ignore[misc]
    return outcomes
