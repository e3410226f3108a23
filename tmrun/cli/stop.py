"""``tmrun stop``: end a job in order."""

from __future__ import annotations

import click

from tmrun.cli import jobs, options
from tmrun.core import transactions
from tmrun.core.errors import RefusedError
from tmrun.core.model import End, JobState
from tmrun.core.plural import many


@click.command("stop", short_help="End a job: workers get SIGTERM, then a grace period.")
@options.job_argument
@click.option("--reason", default="stopped by an operator", show_default=True, help="Shown with the end of the job.")
@options.yes_option
def command(job_id: str | None, job: str | None, etcd: str | None, reason: str, yes: bool) -> None:
    """End a job on all its nodes. Its launchers exit with 143. Asks on a terminal."""
    with jobs.connect(job_id or job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        options.confirm_on_terminal(f"stop job {connection.keys.job} (now on {many(len(current.members), 'node')})?", yes)
        if not connection.store.commit(transactions.end_job(current, End(JobState.STOPPED, 143, reason), as_leader=False)).succeeded:
            raise RefusedError(f"job {connection.keys.job} has ended meanwhile; see `tmrun status`")
        click.echo(f"job {connection.keys.job} is stopping")
