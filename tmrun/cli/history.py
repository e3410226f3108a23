"""``tmrun history``: one line an epoch, each pause split into its phases."""

from __future__ import annotations

import click

from tmrun.cli import jobs, options, read
from tmrun.tui import live, views


@click.command("history", short_help="One line an epoch: cause, who left and joined, the pause by phases.")
@options.job_argument
@options.output_option("text", "json", "yaml")
def command(job_id: str | None, job: str | None, etcd: str | None, output: str) -> None:
    """Show how the rank map came to be. JSON: {"api_version", "job", "history": [rows]}.

    pause: end of the last step before -> end of the first new step, less the median step. detect: first sign of trouble -> notice.
    bind: the joiner takes its rank (in a drain: the wait for the commit). comm: new communicators. state: transfer. redo: the step again.
    """
    with jobs.connect(job_id or job, etcd) as connection:
        rows = read.read_history(connection, connection.read())
        name = connection.keys.job
    if output in ("json", "yaml"):
        options.emit({"job": name, "history": rows}, output)
    else:
        views.show(views.history_view(rows, live.width(views.PIPE)))
