"""``tmrun drain``: move a node's ranks to warm standbys at a step boundary, tell how it goes, wait until the node is free."""

from __future__ import annotations

import queue
import secrets
import time
from dataclasses import dataclass, field

import click

from tmrun.cli import jobs, read, tables
from tmrun.cli.jobs import Connection
from tmrun.core import planner, transactions
from tmrun.core.coordinator import rank_text
from tmrun.core.errors import RefusedError, StillRunningError, TmrunError
from tmrun.core.membership import Job, known_hosts
from tmrun.core.model import Host, Migration, Operation, OpState, Phase
from tmrun.store.api import WatchEvent

_TIMES_WAIT_S = 5.0
"""How long to wait for the stayers' account of the pause after the node is free; it is worth a line, not more."""


@click.command("drain", short_help="Move a node's ranks to a warm standby; the node can then be switched off.")
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
@jobs.job_options
@click.option("--reason", default="", help="Shown wherever the node is shown.")
@click.option("--to", metavar="NODE", default="", help="Take this standby.")
@click.option("--deadline", type=float, metavar="SECONDS", help="Stop waiting after this long (exit 4); the drain goes on.")
@click.option("--detach", is_flag=True, help="Request it and return.")
@click.option("--cancel", is_flag=True, help="Take a drain back that is not committed yet; else exit 3.")
def command(
    nodes: tuple[str, ...], job: str | None, etcd: str | None, reason: str, to: str, deadline: float | None, detach: bool, cancel: bool
) -> None:
    """Cordon NODEs and move their ranks to warm standbys at a step boundary. Training goes on, the other processes are untouched.

    As in Kubernetes a drain moves work away, it does not stop the job. Ctrl-C stops watching, not the drain.
    """
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        hosts = tuple(Host(h) for h in jobs.hosts_of(current, nodes, list(known_hosts(current))))
        if cancel:
            _cancel(connection, current, hosts)
            return
        op = _request(connection, current, hosts, reason, to)
        if not detach:
            _Follower(connection, op).run(deadline)


def _request(connection: Connection, current: Job, hosts: tuple[Host, ...], reason: str, to: str) -> Operation:
    running = next((o for o in current.open_ops() if o.verb == "drain" and set(hosts) <= set(o.hosts)), None)
    if running is not None:
        click.echo(f"already draining (op {running.id}, reason: {running.reason!r})")
        return running
    for host in hosts:
        if current.draining(host):
            raise RefusedError(f"{host} is drained already; `tmrun undrain {host}` brings it back")
    _check_standbys(current, hosts, to)
    op = Operation(f"d-{secrets.token_hex(3)}", "drain", hosts, reason or "drained by an operator", to)
    if not connection.store.commit(transactions.request(current, op)).succeeded:
        raise RefusedError(f"the state of {', '.join(hosts)} changed meanwhile; look at `tmrun status` and try again")
    for host in hosts:
        click.echo(f"{host} cordoned  (op {op.id}, reason: {op.reason!r})")
    return op


def _check_standbys(current: Job, hosts: tuple[Host, ...], to: str) -> None:
    assert current.map is not None or current.spec is not None
    if current.map is None:
        raise RefusedError("the job has no ranks yet; try again when it trains")
    needed = sum(1 for h in hosts if current.map.slot_of_host(h) is not None)
    free = [m.host for m in planner.standbys(current, warm_only=False) if m.host not in hosts and (not to or m.host == to)]
    if len(free) < needed:
        which = f"{to} is no free standby" if to else f"{len(free)} standby nodes for {needed} leaving"
        raise RefusedError(f"cannot drain {', '.join(hosts)}: {which}; start another host with the same tmrun command, then try again")


def _cancel(connection: Connection, current: Job, hosts: tuple[Host, ...]) -> None:
    op = next((o for o in current.open_ops() if o.verb == "drain" and set(hosts) & set(o.hosts)), None)
    if op is None:
        raise RefusedError(f"no open drain of {', '.join(hosts)}; it may be committed already, see `tmrun history`")
    committed = current.map is not None and not any(current.map.slot_of_host(h) is not None for h in op.hosts)
    if committed:
        raise RefusedError(f"drain {op.id} is already committed (epoch {current.epoch})")
    if not connection.store.commit(transactions.withdraw_drain(current, op.hosts, op, "cancelled by an operator")).succeeded:
        raise RefusedError(f"drain {op.id} moved on meanwhile; look at `tmrun status` and try again")
    click.echo(f"drain {op.id} of {', '.join(op.hosts)} cancelled")


@dataclass
class _Follower:
    """Prints each stage of one drain once, from what the store says."""

    connection: Connection
    op: Operation
    said: set[str] = field(default_factory=set)
    moved: int = 0

    def run(self, deadline_s: float | None) -> None:
        """Until the request is finished. Raises StillRunningError, TmrunError."""
        moved: queue.SimpleQueue[None] = queue.SimpleQueue()

        def wake(_: WatchEvent) -> None:
            moved.put(None)

        watch = self.connection.store.watch(self.connection.keys.ctl, wake)
        start = time.monotonic()
        try:
            while not self._look(self.connection.read()):
                if deadline_s is not None and time.monotonic() - start > deadline_s:
                    raise StillRunningError(f"not drained within {deadline_s:g} s; op {self.op.id} goes on, see `tmrun status`")
                try:
                    moved.get(timeout=0.5)
                except queue.Empty:
                    pass
        finally:
            watch.close()

    def _look(self, job: Job) -> bool:
        op = job.ops.get(self.op.id, self.op)
        migration = job.migration.value if job.migration else None
        if migration is not None and migration.op == op.id:
            self._migration(job, migration)
        elif op.state is OpState.OPEN and not planner.standbys(job):
            self._say("waiting", "waiting for a standby to be warm")
        if op.state is OpState.OPEN and job.end is None:
            return False
        if op.state is OpState.DONE:
            self._times()
            self._say("done", op.detail)
            return True
        if op.state is OpState.OPEN:
            raise TmrunError(f"the job ended before {', '.join(op.hosts)} was drained")
        raise TmrunError(f"drain {op.id} {op.state.value}: {op.detail}")

    def _migration(self, job: Job, migration: Migration) -> None:
        spec = job.spec
        assert spec is not None and job.map is not None
        for m in migration.moves:
            text = f"slot {m.slot} (ranks {rank_text(spec.ranks(m.slot))}) {m.leaver.host} -> {m.joiner.host} (warm)"
            self._say(f"plan {migration.id} {m.slot}", f"plan: {text}")
        if migration.phase is Phase.ABORTED:
            self._say(f"abort {migration.id}", f"attempt aborted: {migration.reason}; trying again")
        if migration.phase is Phase.COMMITTED and job.map.migration == migration.id:
            votes = f"{len(job.votes)}/{len(job.votes)}"
            self._say(f"votes {migration.id}", f"prepared: {votes} votes, stop at step {job.map.resume.target}")
            kept = spec.nnodes - len(migration.moves)
            self._say("commit", f"committed epoch {job.epoch}; stayers kept: {kept} nodes, {kept * spec.nproc} processes")
            self.moved = job.epoch

    def _times(self) -> None:
        end = time.monotonic() + _TIMES_WAIT_S
        while self.moved and time.monotonic() < end:
            rows = [r for r in read.read_history(self.connection, self.connection.read()) if r["epoch"] == self.moved]
            if rows and rows[0]["pause_s"] is not None:
                self._say("times", f"step {rows[0]['step']} ran; paused {rows[0]['pause_s']:.2f} s ({tables.phases_text(rows[0])})")
                return
            time.sleep(0.1)

    def _say(self, what: str, text: str) -> None:
        if what not in self.said:
            self.said.add(what)
            click.echo(text)
