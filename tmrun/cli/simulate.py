"""``tmrun simulate``: what a failure model or a trace costs a job, strategy by strategy; tmrun's rows run the production coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from tmrun.cli import pictures, profiles, projections
from tmrun.cli.study import Study, standby_count, study_options
from tmrun.core.errors import UsageError
from tmrun.core.plural import many
from tmrun.sim import compare, trace
from tmrun.sim.ledger import Outcome
from tmrun.sim.plots import bars, curves
from tmrun.sim.trace import Event
from tmrun.tui import live


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
@click.option("--story", is_flag=True, help="Also print each fault and what tmrun's coordinator said, with the largest pool.")
@click.option("--seed", default=0, show_default=True, help="Another seed, other faults.")
@study_options
def command(
    study: Study,
    nodes_text: str,
    days: float,
    standby_text: str,
    wanted: str,
    strategies_file: str,
    trace_file: Path | None,
    write_trace: Path | None,
    story: bool,
    seed: int,
) -> None:
    """Simulate the same faults under every strategy and show where the GPU-hours go.

    The rows of tmrun are decided by the same coordinator that runs jobs; the others are models with published or measured parameters.
    Times are virtual: a week of 1,024 nodes takes seconds, of 8,192 nodes a minute or two for each tmrun row. What is modelled how, and
    what was checked against published figures: docs/simulate.md.
    """
    sizes = _numbers(nodes_text, "--nodes")
    if len(sizes) > 1 and (trace_file or write_trace or study.mttf_h is not None):
        raise UsageError("--trace, --write-trace and --mttf belong to one size: give a single --nodes")
    document = profiles.strategies(strategies_file)
    given = profiles.read_trace(trace_file) if trace_file else None
    model, costs = study.models(sizes[-1])
    shapes = [study.shape(nodes, days, seed) for nodes in sizes]
    pools = [[standby_count(part.strip(), s.nodes) for part in standby_text.split(",")] for s in shapes]
    known = [compare.standing(document) + compare.moving(counts, s) for counts, s in zip(pools, shapes, strict=True)]
    chosen = [compare.choose(these, wanted) for these in known]
    faults = [given or compare.faults(model, s, these) for s, these in zip(shapes, chosen, strict=True)]
    gallery = study.gallery()
    runs: dict[int, list[Outcome]] = {}
    for shape, these, happened in zip(shapes, chosen, faults, strict=True):
        with live.spinner(f"{shape.nodes} nodes, {len(happened)} faults") as say:
            runs[shape.gpus] = compare.run(these, shape, costs, happened, say)
    source = f"faults: {trace_file or f'{model.name}, seed {seed}'}; costs: {costs.name}"
    if write_trace:
        profiles.save(write_trace, trace.write(faults[-1]).encode())
    if gallery:
        _draw(gallery, runs, faults[-1], source, study.nproc, days)
    notes = compare.left_out(given, shapes[-1], chosen[-1]) if given else []
    mttf = "" if given else f", one unplanned fault in {model.mttf_h(sizes[-1]):.3g} h"
    head = f"{shapes[-1].gpus:,} GPUs for {many(days, 'day')}{mttf}; {source}"
    study.show(projections.document(runs, source, days, seed, notes), projections.simulations(runs, head, notes, story=story))


def _draw(
    gallery: pictures.Gallery, runs: Mapping[int, list[Outcome]], happened: Sequence[Event], source: str, nproc: int, days: float
) -> None:
    largest = runs[max(runs)]
    gallery.add("where", bars.where_it_goes(largest, source))
    gallery.add("week", bars.timeline(_few(largest), happened, source))
    if len(runs) > 1:
        gallery.add("scale", curves.over_scale({g: _few(o) for g, o in runs.items()}, nproc, f"{many(days, 'day')}; {source}"))
    if sum(o.pool for o in largest) > 1:
        gallery.add("ettr", curves.ettr_over_standbys(largest, nproc, source))


def _few(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Without the variant that looks the same in a picture."""
    return [o for o in outcomes if not o.strategy.endswith("-unplaced")]


def _numbers(text: str, flag: str) -> list[int]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() for p in parts):
        raise UsageError(f"{flag} {text!r}: expected whole numbers, such as 1024 or 128,1024,8192")
    return sorted({int(p) for p in parts})
