"""``tmrun size``: how many standbys pay off for a job, how sure that is, and what ``--standby 6%`` means for it."""

from __future__ import annotations

from pathlib import Path

import click

from tmrun.cli import options, profiles, projections
from tmrun.cli.simulate import job_options, models
from tmrun.sim import compare, plots, sizing
from tmrun.sim.costs import Costs
from tmrun.sim.failures import FailureModel
from tmrun.sim.ledger import Outcome
from tmrun.sim.shape import Shape
from tmrun.tui import live, views


@click.command("size", short_help="How many standbys pay off, and what --standby 6% means for this job.")
@click.option("--nodes", required=True, type=int, metavar="N", help="Nodes of the job.")
@click.option("--standby", "text", default="6%", show_default=True, metavar="K|P%", help="The wish to explain.")
@click.option("--check", is_flag=True, help="Simulate the best pool and its neighbours too (on the production coordinator).")
@click.option("--days", default=28.0, show_default=True, help="Simulated time of --check.")
@click.option("--seed", default=0, show_default=True, help="Of --check.")
@job_options
def command(
    nodes: int,
    text: str,
    check: bool,
    days: float,
    seed: int,
    nproc: int,
    replicas: int,
    rack_nodes: int,
    failures: str,
    costs_name: str,
    mttf_h: float | None,
    warm_s: float | None,
    output: str,
    plot: Path | None,
) -> None:  # fmt: skip
    """Weigh what idle standbys cost against the waiting that they save, in GPU-hours a week.

    The standby is a node that is held, so small or reliable jobs do best with none: that is said. docs/simulate.md has the formula.
    """
    model, costs = models(failures, costs_name, mttf_h, warm_s, nodes)
    shape = Shape(nodes, nproc, min(replicas, nodes), rack_nodes, days, seed)
    losses = sizing.flows(shape, costs, model)
    best = sizing.best(shape, losses)
    wish = sizing.explain(text, shape, costs, model)
    most = min(max(2 * best.standby, 12), sizing.MOST)
    points = list(sizing.points(shape, losses, range(most + 1)))
    cases = sizing.sensitivity(shape, costs, model)
    pays_from = sizing.pays_from(shape, costs, model) if mttf_h is None else None
    simulated = _check(shape, costs, model, best.standby) if check else []
    source = f"faults: {model.name}, one in {model.mttf_h(nodes):.3g} h; costs: {costs.name}"
    if plot:
        profiles.save(plot / "standbys.svg", plots.over_standbys(points, simulated, shape.gpus, nproc, source))
    if output != "text":
        options.emit(projections.size_document(shape, best, points, cases, wish, pays_from, simulated, source), output)
    else:
        views.show(projections.size_view(shape, best, points, cases, wish, pays_from, simulated, source))


def _check(shape: Shape, costs: Costs, model: FailureModel, best: int) -> list[Outcome]:
    standbys = sorted({max(0, best - 1), best, best + 1, 0})
    chosen = [s for s in compare.moving(standbys, shape) if s.name.removeprefix("tmrun-").isdecimal()]
    with live.spinner(f"{shape.nodes} nodes, {shape.days:g} days") as say:
        return compare.run(chosen, shape, costs, compare.faults(model, shape, chosen), say)
