"""Run strategies side by side on one trace. May not know: files, how results are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tmrun.core.errors import UsageError
from tmrun.sim.baselines import Baseline, Family, Play
from tmrun.sim.costs import Costs
from tmrun.sim.failures import FailureModel, draw
from tmrun.sim.ledger import Outcome
from tmrun.sim.mover import Mover
from tmrun.sim.scene import Options
from tmrun.sim.shape import Shape
from tmrun.sim.trace import Event

NO_OPTIONS = Options()


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


def moving(standbys: Sequence[int], shape: Shape) -> list[Strategy]:
    """tmrun with each number of standbys; with the most, also without placement; for sharded jobs also without snapshots."""
    most = max(standbys)
    found = [Strategy(f"tmrun-{k}", f"tmrun, {k} standby{'' if k == 1 else 's'}", None, Options(k)) for k in sorted(set(standbys))]
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
    """The trace that all of them live through, drawn for the widest."""
    widest = max((s.options.standby for s in strategies if s.baseline is None), default=0)
    return draw(model, shape.nodes, shape.nodes + widest, shape.horizon_s, shape.seed)


def run(
    strategies: Sequence[Strategy], shape: Shape, costs: Costs, trace: Sequence[Event], say: Callable[[str], None] = lambda _: None
) -> list[Outcome]:
    """One outcome a strategy, in order."""
    spares = max((s.options.standby for s in strategies if s.baseline is None), default=0)
    outcomes = []
    for s in strategies:
        say(s.label)
        if s.baseline is not None:
            outcomes.append(Play(shape, costs, s.baseline, spares if s.baseline.family is Family.RESTART else 0, trace).play())
        else:
            outcomes.append(Mover(shape, costs, s.options, trace, s.name, s.label).play())
    return outcomes
