"""What ``simulate`` and ``size`` share: options that describe the job and its models, where results go. May not know: what is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import RenderableType

from tmrun.cli import options, pictures, profiles
from tmrun.core import planner
from tmrun.core.errors import UsageError
from tmrun.sim.costs import Costs
from tmrun.sim.failures import FailureModel
from tmrun.sim.shape import Shape
from tmrun.tui import views

F = TypeVar("F", bound=Callable[..., Any])
FOREVER = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Study:
    """The shared options as they were given."""

    nproc: int
    replicas: int
    rack_nodes: int
    failures: str
    costs: str
    mttf_h: float | None
    warm_s: float | None
    output: str
    plot: Path | None
    png: bool

    def shape(self, nodes: int, days: float, seed: int) -> Shape:
        """The job at this size. Raises UsageError."""
        return Shape(nodes, self.nproc, self.replicas, self.rack_nodes, days, seed)

    def models(self, nodes: int) -> tuple[FailureModel, Costs]:
        """The two models, with what the command line changes. Raises UsageError."""
        model, costs = profiles.failure_model(self.failures), profiles.cost_model(self.costs)
        if self.mttf_h is not None:
            if not 0 < self.mttf_h <= FOREVER:
                raise UsageError(f"--mttf {self.mttf_h:g}: expected hours above 0, at most {FOREVER:,}")
            model = model.scaled(model.mttf_h(nodes) / self.mttf_h)
        if self.warm_s is not None:
            if not 0 <= self.warm_s <= FOREVER:
                raise UsageError(f"--warm {self.warm_s:g}: expected seconds, 0 to {FOREVER:,}")
            costs = replace(costs, standby=replace(costs.standby, warm_s=self.warm_s))
        return model, costs

    def gallery(self) -> pictures.Gallery | None:
        """Where pictures go, if any are wanted; opened before anything long is computed. Raises UsageError."""
        if self.png and self.plot is None:
            raise UsageError("--png says in which form pictures are written: give --plot FOLDER too")
        return pictures.Gallery(self.plot, png=self.png) if self.plot else None

    def show(self, document: Mapping[str, Any], view: RenderableType) -> None:
        """Print in the form that was asked for."""
        if self.output == "text":
            views.show(view)
        else:
            options.emit(document, self.output)


def standby_count(text: str, nodes: int) -> int:
    """As the launcher reads ``--standby``, within what can be simulated. Raises UsageError."""
    count = planner.standby_count(text, nodes)
    if count > nodes:
        raise UsageError(f"--standby {text}: {count:,} standbys for {nodes:,} nodes; expected at most one for each")
    return count


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--nproc-per-node", "nproc", default=8, show_default=True, help="GPUs of a node."),
    click.option("--replicas", default=2, show_default=True, help="Copies of each rank's state in the job; 1: fully sharded."),
    click.option("--rack-nodes", default=8, show_default=True, help="Nodes with the same rack label."),
    click.option("--failures", default="llama3", show_default=True, metavar="NAME|FILE", help="Failure model: a name or a TOML file."),
    click.option(
        "--costs",
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
    click.option("--plot", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER", help="Write pictures there, as SVG."),
    click.option("--png", is_flag=True, help="Write them as PNG too (needs `pip install 'tmrun[png]'`)."),
)


def study_options(function: F) -> F:
    """The shared options, handed to the command as one ``study``."""

    @functools.wraps(function)
    def collected(**given: Any) -> Any:
        shared = {f.name: given.pop(f.name) for f in fields(Study)}
        return function(study=Study(**shared), **given)

    for option in reversed(_OPTIONS):
        collected = option(collected)
    return collected  # type: ignore[return-value]  # the same command, with options in place of the study
