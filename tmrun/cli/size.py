"""``tmrun size``: how many standbys pay off for a job, how sure that is, and what ``--standby 6%`` means for it."""

from __future__ import annotations

import click

from tmrun.cli import projections
from tmrun.cli.study import Study, standby_count, study_options
from tmrun.sim import compare, sizing
from tmrun.sim.costs import Costs
from tmrun.sim.failures import FailureModel
from tmrun.sim.ledger import Outcome
from tmrun.sim.plots import curves
from tmrun.sim.shape import Shape
from tmrun.tui import live


@click.command("size", short_help="How many standbys pay off, and what --standby 6% means for this job.")
@click.option("--nodes", required=True, type=int, metavar="N", help="Nodes of the job.")
@click.option("--standby", "text", default="6%", show_default=True, metavar="K|P%", help="The wish to explain.")
@click.option("--check", is_flag=True, help="Simulate the best pool and its neighbours too (on the production coordinator).")
@click.option("--days", default=28.0, show_default=True, help="Simulated time of --check.")
@click.option("--seed", default=0, show_default=True, help="Of --check.")
@study_options
def command(study: Study, nodes: int, text: str, check: bool, days: float, seed: int) -> None:
    """Weigh what idle standbys cost against the waiting that they save, in GPU-hours a week.

    The standby is a node that is held, so small or reliable jobs do best with none: that is said. docs/simulate.md has the formula.
    """
    shape = study.shape(nodes, days, seed)
    model, costs = study.models(nodes)
    gallery = study.gallery()
    losses = sizing.flows(shape, costs, model)
    best = sizing.best(shape, losses)
    wish = sizing.explain(text, standby_count(text, nodes), shape, costs, model)
    most = min(max(2 * best.standby, 12), sizing.MOST)
    points = list(sizing.points(shape, losses, range(most + 1)))
    cases = sizing.sensitivity(shape, costs, model)
    pays_from = sizing.pays_from(shape, costs, model) if study.mttf_h is None else None
    simulated = _check(shape, costs, model, best.standby) if check else []
    source = f"faults: {model.name}, one in {model.mttf_h(nodes):.3g} h; costs: {costs.name}"
    if gallery:
        gallery.add("standbys", curves.over_standbys(points, simulated, shape.gpus, shape.nproc, source))
    found = (shape, best, points, cases, wish, pays_from, simulated, source)
    study.show(projections.size_document(*found), projections.size_view(*found))


def _check(shape: Shape, costs: Costs, model: FailureModel, best: int) -> list[Outcome]:
    chosen = compare.pools([max(0, best - 1), best, best + 1, 0])
    with live.spinner(f"{shape.nodes} nodes, {shape.days:g} days") as say:
        return compare.run(chosen, shape, costs, compare.faults(model, shape, chosen), say)
