"""``tmrun simulate``: what a failure model or a trace costs a job, strategy by strategy; tmrun's rows run the production coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from tmrun.cli import options, profiles, projections
from tmrun.core.errors import UsageError
from tmrun.core.planner import standby_count
from tmrun.sim import compare, plots, trace
from tmrun.sim.costs import Costs
from tmrun.sim.failures import FailureModel
from tmrun.sim.ledger import Outcome
from tmrun.sim.shape import Shape
from tmrun.sim.trace import Event
from tmrun.tui import live, views

F = TypeVar("F", bound=Callable[..., Any])

_JOB_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--nproc-per-node", "nproc", default=8, show_default=True, help="GPUs of a node."),
    click.option("--replicas", default=2, show_default=True, help="Copies of each rank's state in the job; 1: fully sharded."),
    click.option("--rack-nodes", default=8, show_default=True, help="Nodes with the same rack label."),
    click.option("--failures", default="llama3", show_default=True, metavar="NAME|FILE", help="Failure model: a name or a TOML file."),
    click.option(
        "--costs",
        "costs_name",
        default="paper",
        show_default=True,
        metavar="NAME|FILE",
        help="Costs of the phases: a name, a TOML file, or measured: the JSON of `tmrun history`, the JSONL of `make bench`.",
    ),
    click.option("--mttf", "mttf_h", type=float, metavar="HOURS", help="Mean time between unplanned faults of the job, not the model's."),
    click.option(
        "--warm", "warm_s", type=float, metavar="SECONDS", help="From a machine's arrival to a warm standby, not the cost model's."
    ),
    options.output_option("text", "json", "yaml"),
    click.option("--plot", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER", help="Write SVG pictures there."),
)


def job_options(function: F) -> F:
    """What ``simulate`` and ``size`` share."""
    for option in reversed(_JOB_OPTIONS):
        function = option(function)
    return function


def models(failures: str, costs_name: str, mttf_h: float | None, warm_s: float | None, nodes: int) -> tuple[FailureModel, Costs]:
    """The two models, with what the command line changes. Raises UsageError."""
    model, costs = profiles.failure_model(failures), profiles.cost_model(costs_name)
    if mttf_h is not None:
        if not mttf_h > 0:
            raise UsageError(f"--mttf {mttf_h:g}: expected hours above 0")
        model = model.scaled(model.mttf_h(nodes) / mttf_h)
    if warm_s is not None:
        if not warm_s >= 0:
            raise UsageError(f"--warm {warm_s:g}: expected seconds, a number >= 0")
        costs = replace(costs, standby=replace(costs.standby, warm_s=warm_s))
    return model, costs


@click.command("simulate", short_help="What faults cost a job, strategy by strategy.")
@click.option(
    "--nodes", "nodes_text", default="1024", show_default=True, metavar="N[,N...]", help="Nodes of the job; several sizes give a curve."
)
@click.option("--days", default=7.0, show_default=True, help="Simulated time.")
@click.option(
    "--standby",
    "standby_text",
    default="0,1,2,4",
    show_default=True,
    metavar="K[,K...]",
    help="Pools that tmrun is simulated with: nodes, or 6%.",
)
@click.option("--strategies", "wanted", default="", metavar="A[,B...]", help="Only these; `tmrun` is every tmrun one.")
@click.option("--strategies-file", type=click.Path(dir_okay=False), default="", help="Other baselines (TOML).")
@click.option(
    "--trace", "trace_file", type=click.Path(dir_okay=False, path_type=Path), help="Faults from a CSV or JSONL file instead of a model."
)
@click.option(
    "--write-trace", type=click.Path(dir_okay=False, path_type=Path), help="Write the faults that were drawn as CSV (one size only)."
)
@click.option("--story", is_flag=True, help="Also print what tmrun's coordinator said, with the largest pool.")
@click.option("--seed", default=0, show_default=True, help="Another seed, other faults.")
@job_options
def command(
    nodes_text: str,
    days: float,
    standby_text: str,
    wanted: str,
    strategies_file: str,
    trace_file: Path | None,
    write_trace: Path | None,
    story: bool,
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
    """Simulate the same faults under every strategy and show where the GPU-hours go.

    The rows of tmrun are decided by the same coordinator that runs jobs; the others are models with published or measured parameters.
    Times are virtual: a week of 1,024 nodes takes seconds, of 8,192 nodes a few minutes for each tmrun row. What is modelled how, and what
    was checked against published figures: docs/simulate.md.
    """
    sizes = _numbers(nodes_text, "--nodes")
    if len(sizes) > 1 and (trace_file or write_trace or mttf_h is not None):
        raise UsageError("--trace, --write-trace and --mttf belong to one size: give a single --nodes")
    document = profiles.strategies(strategies_file)
    faults = profiles.read_trace(trace_file) if trace_file else None
    runs: dict[int, list[Outcome]] = {}
    happened: Sequence[Event] = ()
    model, costs = models(failures, costs_name, mttf_h, warm_s, sizes[-1])
    for nodes in sizes:
        shape = Shape(nodes, nproc, min(replicas, nodes), rack_nodes, days, seed)
        chosen = compare.choose(compare.standing(document) + compare.moving(_standbys(standby_text, nodes), shape), wanted)
        happened = faults if faults is not None else compare.faults(model, shape, chosen)
        with live.spinner(f"{nodes} nodes, {len(happened)} faults") as say:
            runs[shape.gpus] = compare.run(chosen, shape, costs, happened, say)
    source = f"faults: {trace_file or f'{model.name}, seed {seed}'}; costs: {costs.name}"
    if write_trace:
        profiles.save(write_trace, trace.write(happened))
    if plot:
        _draw(plot, runs, happened, source, nproc, days)
    gpus = sizes[-1] * nproc
    if output != "text":
        options.emit(projections.document(runs, source, days, seed), output)
        return
    mttf = "" if faults else f", one unplanned fault in {model.mttf_h(sizes[-1]):.3g} h"
    views.show(projections.simulation(runs[gpus], f"{gpus:,} GPUs for {days:g} days{mttf}; {source}"))
    if len(runs) > 1:
        views.show(projections.scales(runs))
    if story:
        views.show(projections.story(runs[gpus]))


def _draw(folder: Path, runs: dict[int, list[Outcome]], happened: Sequence[Event], source: str, nproc: int, days: float) -> None:
    largest = runs[max(runs)]
    pictures = {"where.svg": plots.where_it_goes(largest, source), "week.svg": plots.timeline(_few(largest), happened, source)}
    if len(runs) > 1:
        pictures["scale.svg"] = plots.over_scale({g: _few(o) for g, o in runs.items()}, f"{days:g} days; {source}")
    if sum(o.strategy.removeprefix("tmrun-").isdecimal() for o in largest) > 1:
        pictures["ettr.svg"] = plots.ettr_over_standbys(largest, nproc, source)
    for name, text in pictures.items():
        profiles.save(folder / name, text)


def _few(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Without the variant that looks the same in a picture."""
    return [o for o in outcomes if not o.strategy.endswith("-unplaced")]


def _numbers(text: str, flag: str) -> list[int]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() for p in parts):
        raise UsageError(f"{flag} {text!r}: expected whole numbers, such as 1024 or 128,1024,8192")
    return sorted({int(p) for p in parts})


def _standbys(text: str, nodes: int) -> list[int]:
    return sorted({standby_count(p.strip(), nodes) for p in text.split(",")})
