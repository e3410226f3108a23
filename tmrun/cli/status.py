"""``tmrun status``: one screen of truth."""

from __future__ import annotations

import json

import click

from tmrun.cli import jobs, read, tables


@click.command("status", short_help="Nodes, ranks, epoch, step, standbys, the last migration.")
@click.argument("job_id", metavar="[JOB]", required=False)
@jobs.job_options
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(job_id: str | None, job: str | None, etcd: str | None, output: str) -> None:
    """Show one job. JSON field names are stable (api_version 1)."""
    with jobs.connect(job_id or job, etcd) as connection:
        value = read.read_status(connection)
    if output == "json":
        click.echo(json.dumps(value, indent=2))
    else:
        tables.show(tables.status_view(value))
