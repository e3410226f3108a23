"""``tmrun pause`` and ``resume``: stop automatic replacement of a job, and let it go on."""

from __future__ import annotations

import click

from tmrun.cli import jobs, options
from tmrun.core import transactions
from tmrun.core.errors import RefusedError
from tmrun.core.model import Pause


@click.command("pause", short_help="Stop automatic replacement: failures are shown, nothing is moved or restarted.")
@options.job_argument
@click.option("--reason", default="paused by an operator", show_default=True, help="Shown wherever the job is shown.")
def pause(job_id: str | None, job: str | None, etcd: str | None, reason: str) -> None:
    """Hold every automatic replacement and restart back until `tmrun resume`. Training itself goes on; drains that you ask for too.

    While a rank is missing the others wait inside their step, with their state.
    """
    with jobs.connect(job_id or job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        if current.pause is not None:
            click.echo(f"job {connection.keys.job} is paused already (reason: {current.pause.reason!r})")
            return
        if not connection.store.commit(transactions.pause(current, Pause(reason))).succeeded:
            raise RefusedError("the job's state changed meanwhile; look at `tmrun status` and try again")
        click.echo(f"job {connection.keys.job}: automatic replacement is paused (reason: {reason!r}); `tmrun resume` lets it go on")


@click.command("resume", short_help="Let automatic replacement go on.")
@options.job_argument
def resume(job_id: str | None, job: str | None, etcd: str | None) -> None:
    """Take a pause back; what was held back happens now."""
    with jobs.connect(job_id or job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        if current.pause is None:
            click.echo(f"job {connection.keys.job} is not paused")
            return
        if not connection.store.commit(transactions.resume(current)).succeeded:
            raise RefusedError("the job's state changed meanwhile; look at `tmrun status` and try again")
        click.echo(f"job {connection.keys.job}: automatic replacement goes on")
