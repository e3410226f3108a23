"""``tmrun cordon`` and ``uncordon``: whether a node may be chosen as a joiner. Its ranks stay."""

from __future__ import annotations

import click

from tmrun.cli import jobs, options
from tmrun.core import transactions
from tmrun.core.errors import RefusedError


@click.command("cordon", short_help="Never choose NODEs as joiners; the ranks they hold stay.")
@options.nodes_argument
@jobs.job_options
@click.option("--reason", default="cordoned by an operator", show_default=True, help="Shown wherever the node is shown.")
def cordon(nodes: tuple[str, ...], job: str | None, etcd: str | None, reason: str) -> None:
    """Keep NODEs from taking over ranks. Cordoned standbys stay warm, but do not count as standbys. Doing it again changes the reason."""
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        hosts = options.hosts(current, nodes)
        if not connection.store.commit(transactions.cordon(current, hosts, reason)).succeeded:
            raise RefusedError("somebody else changed these nodes meanwhile; look at `tmrun nodes` and try again")
        for host in hosts:
            click.echo(f"{host} cordoned  (reason: {reason!r})")


@click.command("uncordon", short_help="NODEs may be chosen as joiners again.")
@options.nodes_argument
@jobs.job_options
def uncordon(nodes: tuple[str, ...], job: str | None, etcd: str | None) -> None:
    """Take a cordon back. A drained node stays drained: `tmrun undrain` brings it back."""
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        hosts = options.hosts(current, nodes)
        if not connection.store.commit(transactions.uncordon(current, hosts)).succeeded:
            raise RefusedError("somebody else changed these nodes meanwhile; look at `tmrun nodes` and try again")
        for host in hosts:
            drained = f"; it stays drained, `tmrun undrain {host}` brings it back" if current.draining(host) else ""
            click.echo(f"{host} uncordoned{drained}")
