"""``tmrun drain``: move a node's ranks to warm standbys at a step boundary, tell how it goes, wait until the node is free."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import click

from tmrun.cli import jobs, options, plan, read
from tmrun.cli.jobs import Connection
from tmrun.core import foresight, planner, transactions
from tmrun.core import migration as judging
from tmrun.core.errors import RefusedError, StillRunningError, TmrunError, UsageError
from tmrun.core.membership import Job
from tmrun.core.model import Host, Migration, Operation, OpState, Phase, Verb
from tmrun.core.plural import many
from tmrun.core.ranklist import ranks_named
from tmrun.store.api import WatchEvent
from tmrun.tui import timeline

_TIMES_WAIT_S = 5.0
"""How long to wait for the stayers' account of the pause after the node is free; it is worth a line, not more."""


@click.command("drain", short_help="Move a node's ranks to a warm standby; the node can then be switched off.")
@click.argument("nodes", metavar="[NODE]...", nargs=-1, shell_complete=options.complete_nodes)
@jobs.job_options
@click.option("--self", "own", is_flag=True, help="The node that this machine is.")
@click.option("--reason", default="", help="Shown wherever the node is shown.")
@click.option("--to", metavar="NODE", default="", help="Take this standby.", shell_complete=options.complete_nodes)
@click.option("--deadline", type=options.Duration(), metavar="DURATION", help="Wait this long at most (90s, 10m), then exit 4.")
@click.option(
    "--on-deadline",
    type=click.Choice(["keep", "force"]),
    default="keep",
    show_default=True,
    help="keep: the drain goes on. force: the node gives up its ranks without handing them over; the step is redone.",
)
@click.option("--detach", is_flag=True, help="Request it and return.")
@click.option("--dry-run", is_flag=True, help="Show the plan, change nothing.")
@click.option("--cancel", is_flag=True, help="Take a drain back that is not committed yet; else exit 3. Also by its id (d-...).")
@options.yes_option
def command(
    nodes: tuple[str, ...],
    job: str | None,
    etcd: str | None,
    own: bool,
    reason: str,
    to: str,
    deadline: float | None,
    on_deadline: str,
    detach: bool,
    dry_run: bool,
    cancel: bool,
    yes: bool,
) -> None:
    """Cordon NODEs and move their ranks to warm standbys at a step boundary. Training goes on, the other processes are untouched.

    As in Kubernetes a drain moves work away, it does not stop the job. Several nodes go in one migration where standbys allow. Ctrl-C
    stops watching, not the drain; repeating the command watches again.
    """
    if on_deadline == "force" and deadline is None:
        raise UsageError("--on-deadline force needs --deadline: after how long?")
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        jobs.still_running(current)
        typed = (*nodes, *jobs.own_hosts(connection.keys.job)) if own else nodes
        hosts = _named(current, typed, cancel)
        if cancel:
            _cancel(connection, current, hosts)
        elif dry_run:
            plan.show(current, hosts, foresight.drain(current, hosts, read.read_history(connection, current), to))
        else:
            force_after_s = deadline if deadline is not None and on_deadline == "force" else 0.0
            if force_after_s:
                options.confirm(f"after {force_after_s:g} s what {', '.join(hosts)} did not hand over is lost. Go on?", yes)
            op = request(connection, current, hosts, reason, to, force_after_s=force_after_s)
            if not detach:
                Follower(connection, op).run(None if force_after_s else deadline)


def _named(current: Job, typed: tuple[str, ...], cancel: bool) -> tuple[Host, ...]:
    if not typed:
        raise UsageError("which node? name it, or --self for this machine; `tmrun nodes` lists them")
    if cancel and len(typed) == 1:
        ops = [o for o in current.open_ops() if o.id == typed[0]] or [o for o in current.open_ops() if o.id.startswith(typed[0])]
        if len(ops) == 1 and typed[0].startswith(("d-", "r-")):
            return ops[0].hosts
    return options.hosts(current, typed)


def request(
    connection: Connection,
    current: Job,
    hosts: tuple[Host, ...],
    reason: str,
    to: str = "",
    *,
    verb: Verb = Verb.DRAIN,
    force_after_s: float = 0.0,
    tell: Callable[[str], None] = click.echo,
) -> Operation:
    """Write the request, or find the one that is going on. Raises RefusedError."""
    running = next((o for o in current.open_ops() if o.verb is verb and set(hosts) <= set(o.hosts)), None)
    if running is not None:
        tell(f"already {_ING[verb]} (op {running.id}, reason: {running.reason!r})")
        return running
    target = options.hosts(current, [to])[0] if to else ""
    if verb is Verb.DRAIN:
        _check(current, hosts, target)
    op = Operation(f"{verb.value[0]}-{secrets.token_hex(3)}", verb, hosts, reason or f"{_ED[verb]} by an operator", target, force_after_s)
    if not connection.store.commit(transactions.request(current, op)).succeeded:
        raise RefusedError(f"the state of {', '.join(hosts)} changed meanwhile; look at `tmrun status` and try again")
    for host in hosts:
        tell(f"{host} cordoned  (op {op.id}, reason: {op.reason!r})")
    if verb is Verb.DRAIN and not foresight.movable(current):
        tell(f"{foresight.UNMOVABLE}: `tmrun replace {' '.join(hosts)}`")
    return op


_ING = {Verb.DRAIN: "draining", Verb.REPLACE: "replacing"}
_ED = {Verb.DRAIN: "drained", Verb.REPLACE: "replaced"}


def _check(current: Job, hosts: tuple[Host, ...], to: str) -> None:
    for host in hosts:
        if current.draining(host):
            raise RefusedError(f"{host} is drained already; `tmrun undrain {host}` brings it back")
    if current.map is None:
        raise RefusedError("the job has no ranks yet; try again when it trains")
    needed = sum(1 for h in hosts if current.map.slot_of_host(h) is not None)
    free = [m.host for m in planner.standbys(current, warm_only=False) if m.host not in hosts and (not to or m.host == to)]
    if len(free) < needed:
        which = f"{to} is no free standby" if to else f"{many(len(free), 'standby node')} for {needed} leaving"
        raise RefusedError(f"cannot drain {', '.join(hosts)}: {which}; start another host with the same tmrun command, then try again")


def _cancel(connection: Connection, current: Job, hosts: tuple[Host, ...]) -> None:
    op = next((o for o in current.open_ops() if o.verb is Verb.DRAIN and set(hosts) & set(o.hosts)), None)
    if op is None:
        raise RefusedError(f"no open drain of {', '.join(hosts)}; it may be committed already, see `tmrun history`")
    committed = current.map is not None and not any(current.map.slot_of_host(h) is not None for h in op.hosts)
    if committed:
        raise RefusedError(f"drain {op.id} is already committed (epoch {current.epoch})")
    if not connection.store.commit(transactions.withdraw_drain(current, op.hosts, op, "cancelled by an operator")).succeeded:
        raise RefusedError(f"drain {op.id} moved on meanwhile; look at `tmrun status` and try again")
    click.echo(f"drain {op.id} of {', '.join(op.hosts)} cancelled")


@dataclass
class Follower:
    """Prints each stage of one request once, from what the store says."""

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
                    raise StillRunningError(
                        f"not {_ED[self.op.verb]} within {deadline_s:g} s; op {self.op.id} goes on, see `tmrun status`, or take it back "
                        f"with `tmrun drain --cancel {self.op.id}`"
                    )
                try:
                    moved.get(timeout=0.5)
                except queue.Empty:
                    pass
        except KeyboardInterrupt:
            click.echo(f"tmrun: not watching any more; op {self.op.id} goes on, see `tmrun status`", err=True)
            raise
        finally:
            watch.close()

    def _look(self, job: Job) -> bool:
        op = job.ops.get(self.op.id, self.op)
        if op.verb is not self.op.verb:
            self._say("forced", f"not drained within {self.op.force_after_s:g} s: the ranks of {', '.join(op.hosts)} are given up now")
        migration = job.migration.value if job.migration else None
        if migration is not None and self._ours(migration, op):
            self._migration(job, migration)
        elif op.state is OpState.OPEN and not planner.standbys(job):
            self._say("waiting", _waiting(job))
        if op.state is OpState.OPEN and job.end is None:
            return False
        if op.state is OpState.DONE:
            self._times()
            self._say("done", op.detail)
            return True
        if op.state is OpState.OPEN:
            raise TmrunError(f"the job ended before the {op.verb.value} of {', '.join(op.hosts)} was done")
        raise TmrunError(f"{op.verb.value} {op.id} {op.state.value}: {op.detail}")

    def _ours(self, migration: Migration, op: Operation) -> bool:
        return migration.op == op.id or (op.verb is Verb.REPLACE and any(m.leaver.host in op.hosts for m in migration.moves))

    def _migration(self, job: Job, migration: Migration) -> None:
        spec = job.spec
        assert spec is not None and job.map is not None
        for m in migration.moves:
            near = foresight.nearness(job, m)
            how = f"warm, same {near}" if near else "warm"
            text = f"slot {m.slot} ({ranks_named(spec.ranks(m.slot))}) {m.leaver.host} -> {m.joiner.host} ({how})"
            self._say(f"plan {migration.id} {m.slot}", f"plan: {text}")
        if migration.phase is Phase.ABORTED:
            self._say(f"abort {migration.id}", f"attempt aborted: {migration.reason}; trying again")
        if migration.phase is Phase.COMMITTED and job.map.migration == migration.id:
            votes = f"{len(job.votes)}/{len(job.votes)}"
            where = "stop at" if migration.kind.value == "drain" else "going on with"
            self._say(f"votes {migration.id}", f"prepared: {votes} votes, {where} step {job.map.resume.target}")
            self._say(f"commit {job.epoch}", f"committed epoch {job.epoch}; stayers kept: {judging.stayers(spec, migration)}")
            self.moved = job.epoch

    def _times(self) -> None:
        end = time.monotonic() + _TIMES_WAIT_S
        while self.moved and time.monotonic() < end:
            rows = [r for r in read.read_history(self.connection, self.connection.read()) if r["epoch"] == self.moved]
            if rows and rows[0]["pause_s"] is not None:
                self._say("times", f"step {rows[0]['step']} ran; paused {rows[0]['pause_s']:.2f} s ({timeline.phases_text(rows[0])})")
                return
            time.sleep(0.1)

    def _say(self, what: str, text: str) -> None:
        if what not in self.said:
            self.said.add(what)
            click.echo(text)


def _waiting(job: Job) -> str:
    cold = [m.host for m in planner.standbys(job, warm_only=False) if not m.warm]
    return f"waiting for {', '.join(cold)} to be warm" if cold else "waiting for a standby: start another host with the same tmrun command"
