"""``tmrun plan`` and ``tmrun ok-to-drain``: what a drain would do, and whether it could be done now."""

from __future__ import annotations

from typing import Any

import click

from tmrun.cli import jobs, options, read
from tmrun.core import foresight
from tmrun.core.errors import RefusedError
from tmrun.core.foresight import Foresight
from tmrun.core.membership import Job
from tmrun.core.model import Host
from tmrun.tui import views


@click.command("plan", short_help="The exact moves of a drain, where state comes from, the expected pause. Changes nothing.")
@options.nodes_argument
@jobs.job_options
@click.option("--to", metavar="NODE", default="", help="Take this standby.", shell_complete=options.complete_nodes)
@options.output_option("text", "json", "yaml")
def plan(nodes: tuple[str, ...], job: str | None, etcd: str | None, to: str, output: str) -> None:
    """Show what `tmrun drain NODE...` would do now. Exit code 3 when something is in the way."""
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        hosts = options.hosts(current, nodes)
        target = options.hosts(current, [to])[0] if to else ""
        found = foresight.drain(current, hosts, read.read_history(connection, current), target)
    show(current, hosts, found, output)
    if found.blockers:
        raise RefusedError(f"cannot drain {', '.join(hosts)} now: {'; '.join(found.blockers)}")


@click.command("ok-to-drain", short_help="Exit code 0 when NODEs can be drained now, else 3 with what is in the way.")
@options.nodes_argument
@jobs.job_options
@options.output_option("text", "json", "yaml")
def ok_to_drain(nodes: tuple[str, ...], job: str | None, etcd: str | None, output: str) -> None:
    """Answer for scripts: can these nodes all be drained now? Nothing is changed, and nothing is promised for later."""
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        hosts = options.hosts(current, nodes)
        found = foresight.drain(current, hosts, ())
    if output != "text":
        options.emit({"job": current.keys.job, "nodes": list(hosts), "ok": not found.blockers, "blockers": list(found.blockers)}, output)
    if found.blockers:
        raise RefusedError(f"cannot drain {', '.join(hosts)} now: {'; '.join(found.blockers)}")
    if output == "text":
        click.echo(f"ok: {', '.join(hosts)} can be drained")


def show(job: Job, hosts: tuple[Host, ...], found: Foresight, output: str = "text") -> None:
    """Print a plan."""
    value = as_json(job, found)
    if output == "text":
        views.show(views.foresight_view(value))
    else:
        options.emit({"job": job.keys.job, "nodes": list(hosts), **value}, output)


def as_json(job: Job, found: Foresight) -> dict[str, Any]:
    """A plan as plain values."""
    ranks = job.spec.ranks if job.spec else (lambda _: ())
    return {
        "moves": [
            {
                "slot": m.slot,
                "ranks": list(ranks(m.slot)),
                "leaver": m.leaver.host,
                "joiner": m.joiner.host,
                "source": m.leaver.host,
                "near": foresight.nearness(job, m) or None,
            }
            for m in found.moves
        ],
        "blockers": list(found.blockers),
        "notes": list(found.notes),
        "pause_s": list(found.pause_s) if found.pause_s else None,
        "bytes_a_rank": found.bytes_a_rank,
    }
