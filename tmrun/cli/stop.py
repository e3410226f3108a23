"""``tmrun stop``: end a job in order."""

from __future__ import annotations

import click

from tmrun.cli import jobs
from tmrun.core import transactions
from tmrun.core.model import End, JobState


@click.command("stop", short_help="End a job: workers get SIGTERM, then a grace period.")
@click.argument("job_id", metavar="[JOB]", required=False)
@jobs.job_options
@click.option("--reason", default="stopped by an operator", show_default=True)
def command(job_id: str | None, job: str | None, etcd: str | None, reason: str) -> None:
    """End a job on all its nodes. Its launchers exit with 143."""
    with jobs.connect(job_id or job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        connection.store.commit(transactions.end_job(current, End(JobState.STOPPED, 143, reason), as_leader=False))
        click.echo(f"job {connection.keys.job} is stopping")
