"""``tmrun history``: one line an epoch, each pause split into its phases."""

from __future__ import annotations

import json

import click

from tmrun.cli import jobs, read, tables


@click.command("history", short_help="One line an epoch: cause, who left and joined, the pause by phases.")
@click.argument("job_id", metavar="[JOB]", required=False)
@jobs.job_options
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(job_id: str | None, job: str | None, etcd: str | None, output: str) -> None:
    """Show how the rank map came to be. JSON: {"api_version", "job", "history": [rows]}.

    pause: end of the last step before -> end of the first new step, less the median step. detect: first sign of trouble -> notice.
    bind: the joiner takes its rank (in a drain: the wait for the commit). comm: new communicators. state: transfer. redo: the step again.
    """
    with jobs.connect(job_id or job, etcd) as connection:
        rows = read.read_history(connection, connection.read())
        name = connection.keys.job
    if output == "json":
        click.echo(json.dumps({"api_version": 1, "job": name, "history": rows}, indent=2))
    else:
        tables.show(tables.history_table(rows))
