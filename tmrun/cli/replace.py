"""``tmrun replace``: treat nodes as failed now, whatever they say of themselves."""

from __future__ import annotations

import click

from tmrun.cli import drain, jobs, options
from tmrun.cli.jobs import Connection
from tmrun.core import codec
from tmrun.core.errors import RefusedError
from tmrun.core.membership import Job
from tmrun.core.model import Host, Obituary, Verb
from tmrun.core.txn import Put, Txn


@click.command("replace", short_help="Treat NODEs as failed now; asks, because what they have not handed over is redone.")
@options.nodes_argument
@jobs.job_options
@click.option("--reason", default="replaced by an operator", show_default=True, help="Shown wherever the node is shown.")
@click.option("--deadline", type=options.Duration(), metavar="DURATION", help="Stop watching after this long (exit 4); it goes on.")
@click.option("--detach", is_flag=True, help="Request it and return.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, change nothing.")
@options.yes_option
def command(
    nodes: tuple[str, ...], job: str | None, etcd: str | None, reason: str, deadline: float | None, detach: bool, dry_run: bool, yes: bool
) -> None:
    """Make NODEs give up their ranks at once; a warm standby takes them over and the step is redone. Afterwards they are drained.

    A node that answers ends its workers itself. Of one that does not, you confirm that it is dead: nobody waits for its lease any more,
    so be certain (power it off first).
    """
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        hosts = options.hosts(current, nodes)
        if current.pause is not None:
            raise RefusedError("automatic replacement is paused, nobody would take the ranks over; `tmrun resume` first")
        answering = tuple(h for h in hosts if h in current.members)
        silent = tuple(h for h in hosts if h not in current.members)
        if dry_run:
            _say(answering, silent)
            return
        _ask(answering, silent, yes)
        for host in silent:
            _bury(connection, current, host)
        if answering:
            op = drain.request(connection, current, answering, reason, verb=Verb.REPLACE)
            if not detach:
                drain.Follower(connection, op).run(deadline)


def _say(answering: tuple[Host, ...], silent: tuple[Host, ...]) -> None:
    for host in answering:
        click.echo(f"{host} answers: it would end its workers and give up its ranks")
    for host in silent:
        click.echo(f"{host} does not answer: its death would be confirmed")


def _ask(answering: tuple[Host, ...], silent: tuple[Host, ...], yes: bool) -> None:
    if answering:
        options.confirm(f"still answering: {', '.join(answering)}; `tmrun drain` would lose nothing. Kill the workers there?", yes)
    if silent:
        options.confirm(f"is it certain that every process of {', '.join(silent)} is dead?", yes)


def _bury(connection: Connection, job: Job, host: Host) -> None:
    """Confirm a death, so that nobody waits for a machine that may only be cut off."""
    seat = next((s for s in job.map.seats if s.host == host), None) if job.map else None
    if seat is None:
        raise RefusedError(f"{host} holds no ranks and does not answer: there is nothing to replace")
    note = codec.encode(Obituary(seat.host, seat.incarnation))
    connection.store.commit(Txn((), (Put(connection.keys.obituary(host), note),), "obituary"))
    click.echo(f"{host} is confirmed dead; its ranks move as soon as a standby is warm, see `tmrun status`")
