"""``tmrun undrain``: a drained node becomes a standby again."""

from __future__ import annotations

import click

from tmrun.cli import jobs, options
from tmrun.core import transactions
from tmrun.core.errors import RefusedError


@click.command("undrain", short_help="Bring a drained (or replaced) node back as a standby.")
@options.nodes_argument
@jobs.job_options
def command(nodes: tuple[str, ...], job: str | None, etcd: str | None) -> None:
    """Make NODEs standbys again; they warm up and can then take ranks. A cordon of its own stays."""
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        hosts = options.hosts(current, nodes)
        busy = [o for o in current.open_ops() if set(hosts) & set(o.hosts)]
        if busy:
            raise RefusedError(
                f"{', '.join(busy[0].hosts)}: {busy[0].verb.value} {busy[0].id} is still going on; `tmrun drain --cancel` takes it back"
            )
        idle = [h for h in hosts if not current.draining(h)]
        if idle:
            raise RefusedError(f"not drained: {', '.join(idle)}")
        if not connection.store.commit(transactions.withdraw_drain(current, hosts, None, "")).succeeded:
            raise RefusedError("the job's state changed meanwhile; look at `tmrun status` and try again")
        for host in hosts:
            cordoned = f"; it is cordoned, `tmrun uncordon {host}` lets it be chosen" if current.admins[host].cordoned else ""
            click.echo(f"{host} is a standby again{cordoned}")
