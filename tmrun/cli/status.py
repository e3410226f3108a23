"""``tmrun status``: one screen of truth."""

from __future__ import annotations

import click

from tmrun.cli import jobs, options, read
from tmrun.core import report
from tmrun.core.errors import StoreError
from tmrun.tui import live, views


@click.command("status", short_help="Health, epoch, step, standbys, nodes, the open and the last migration.")
@options.job_argument
@options.output_option("text", "wide", "json", "yaml")
@click.option("-w", "--watch", type=options.Duration(), is_flag=False, flag_value="2s", metavar="[SECONDS]", help="Again and again.")
def command(job_id: str | None, job: str | None, etcd: str | None, output: str, watch: float | None) -> int:
    """Show one job. The names of JSON fields are stable; new ones may be added (api_version 1).

    AGE: since a node last got further, by the clocks of that node and of this one. Exit code 6 when the store does not answer; what this
    machine knows without it is shown.
    """
    with jobs.connect(job_id or job, etcd) as connection:
        if watch is not None:
            live.repeat(lambda: _show(read.status(connection), output), watch)
        value = read.status(connection)
        _show(value, output)
        return StoreError.exit_code if value["state"] == report.UNKNOWN else 0


def _show(value: views.Value, output: str) -> None:
    if output in ("json", "yaml"):
        options.emit(value, output)
    else:
        views.show(views.status_view(value, live.width(), wide=output == "wide"))
