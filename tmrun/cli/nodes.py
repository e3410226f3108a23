"""``tmrun nodes``: one line a node."""

from __future__ import annotations

import click

from tmrun.cli import jobs, options, read
from tmrun.core.model import NodeState
from tmrun.tui import live, views

_STATES = [s.value for s in NodeState]


@click.command("nodes", short_help="One line a node: state, ranks, step, labels, why.")
@options.job_argument
@options.output_option("text", "wide", "json", "yaml", "name")
@click.option("-R", "--why", is_flag=True, help="Only nodes that somebody should look at: neither active nor standby, or cordoned.")
@click.option("--state", type=click.Choice(_STATES), multiple=True, help="Only nodes in this state. Repeatable.")
def command(job_id: str | None, job: str | None, etcd: str | None, output: str, why: bool, state: tuple[str, ...]) -> None:
    """List nodes. `-o name` prints names only, one a line."""
    with jobs.connect(job_id or job, etcd) as connection:
        value = read.read_status(connection)
    rows = [n for n in value["nodes"] if not state or n["state"] in state]
    if why:
        rows = [n for n in rows if n["state"] not in ("active", "standby") or n["cordoned"]]
    if output == "name":
        for row in rows:
            click.echo(row["name"])
    elif output in ("json", "yaml"):
        options.emit({"job": value["job"], "nodes": rows}, output)
    else:
        views.show(views.nodes_table(rows, wide=output == "wide" or live.width() > 140))
