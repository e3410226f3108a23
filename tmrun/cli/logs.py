"""``tmrun logs``: what the workers of a node said, with node and global rank in front. Files are read on this machine.

May not know: who wrote them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click

from tmrun.cli import jobs, options
from tmrun.cli.jobs import Connection
from tmrun.core import losses
from tmrun.core.errors import NotFoundError, UsageError
from tmrun.core.membership import Job
from tmrun.core.model import Host

_LOOK_S = 0.5
TAIL = 200
_HINT = "launch with --log-dir DIR (or -r 3) to have the workers' output in files"


@dataclass
class Source:
    """One file of one worker, and how far it has been read."""

    label: str
    path: Path
    offset: int = 0

    def news(self) -> list[str]:
        """Whole lines that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                found = file.read()
        except OSError:
            return []
        whole = found[: found.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.decode(errors="replace").splitlines()


@click.command("logs", short_help="What the workers of a node or rank said, with node and global rank in front.")
@click.argument("what", metavar="[NODE|RANK]", required=False, shell_complete=options.complete_nodes)
@jobs.job_options
@click.option("-f", "--follow", is_flag=True, help="Go on as they say more, until the job ends.")
@click.option("-n", "--last", type=click.IntRange(0), metavar="N", help="Only the last N lines of each file.")
@click.option("--first-failure", is_flag=True, help="The node whose failure caused the newest replacement.")
def command(what: str | None, job: str | None, etcd: str | None, follow: bool, last: int | None, first_failure: bool) -> None:
    """Show logs that are on this machine: run it on the node itself, or where --log-dir is shared.

    Workers' output is in files when the job was launched with --log-dir, -r or -t; standbys always write their rehearsal to a file.
    """
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        host, rank = _chosen(current, what, first_failure)
        found = sources(connection, current, host, rank)
        if not found:
            raise NotFoundError(f"no logs of {host} on this machine: run this on {host}; {_HINT}")
        told = [(source, source.news()) for source in found]
        for source, lines in told:
            _show(source, lines if last is None else lines[len(lines) - last :])
        if not any(lines for _, lines in told):
            where = ", ".join(sorted({str(source.path.parent) for source in found}))
            click.echo(f"tmrun: nothing is in the files of {host} yet ({where}); {_HINT}", err=True)
        while follow and connection.read().end is None:
            time.sleep(_LOOK_S)
            for source in found:
                _show(source, source.news())


def _show(source: Source, lines: list[str]) -> None:
    for line in lines:
        click.echo(f"[{source.label}] {line}")


def _chosen(current: Job, what: str | None, first_failure: bool) -> tuple[Host, int | None]:
    """(node, rank or None for all of its ranks)."""
    if first_failure:
        return _failed(current), None
    if what is None:
        raise UsageError("whose logs? give a node or a global rank; `tmrun nodes` lists them")
    if not what.isdecimal():
        return options.hosts(current, [what])[0], None
    if current.map is None or current.spec is None or int(what) >= current.spec.world:
        raise NotFoundError(f"no rank {what}: the job has ranks 0-{current.spec.world - 1 if current.spec else 0}")
    return current.map.seats[int(what) // current.spec.nproc].host, int(what)


def _failed(current: Job) -> Host:
    host = losses.blamed(current)
    if host is not None:
        return host
    raise NotFoundError("nothing has failed in the current epoch; `tmrun history` shows earlier ones")


def sources(connection: Connection, current: Job, host: Host, rank: int | None = None) -> list[Source]:
    """Files of a node's workers that this machine has: of its ranks, and of its rehearsal when it is (or was) a standby."""
    return [*worker_files(connection, current, host, rank), *([] if rank is not None else _rehearsals(connection, host))]


def _rehearsals(connection: Connection, host: Host) -> list[Source]:
    found = sorted(p for folder in jobs.runtime_folders(connection.keys.job) for p in folder.glob(f"{host}.*.rehearsal.log"))
    return [Source(f"{host} rehearsal {p.name.split('.')[-3]}", p) for p in found]


def worker_files(connection: Connection, current: Job, host: Host, rank: int | None) -> list[Source]:
    """Output files of the newest attempt, by global rank, as the node's agent told where they are."""
    told = connection.store.get(connection.keys.logs(host))
    if told is None or current.spec is None:
        return []
    slot = current.map.slot_of_host(host) if current.map else None
    ranks = current.spec.ranks(slot) if slot is not None else ()
    found = []
    for path in sorted(Path(told.value).glob("*/*.log")):
        if not path.parent.name.isdecimal() or int(path.parent.name) >= current.spec.nproc:
            continue
        who = ranks[int(path.parent.name)] if ranks else None
        if rank is None or who == rank:
            label = f"{host} rank {who}" if who is not None else f"{host} local rank {path.parent.name}"
            found.append(Source(f"{label} {path.stem}", path))
    return found


def tail(connection: Connection, host: str) -> list[str]:
    """The last lines of a node, for ``top``."""
    lines = [f"[{s.label}] {line}" for s in sources(connection, connection.read(), Host(host)) for line in s.news()[-TAIL:]]
    return lines[-TAIL:]
