"""``tmrun chaos``: do harm to a node of one's own job on purpose, and watch what becomes of it.

The request goes to the node's agent through the store, wherever it runs. May not know: how the harm is done.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import click

from tmrun.cli import events, jobs, options, read
from tmrun.cli.jobs import Connection
from tmrun.core import planner, policy, transactions
from tmrun.core.errors import NotFoundError, OutcomeUnknown, RefusedError, StillRunningError, TmrunError, UsageError
from tmrun.core.membership import Job
from tmrun.core.model import FENCE_SHARE, Cause, Event, Fault, FaultKind, Host, JobState, Kind
from tmrun.core.ranklist import ranks_named
from tmrun.core.story import EventKind
from tmrun.tui import launch_view, views

_TAKE_S = 10.0
"""An agent looks at its keys as soon as they change; one that does not is busy with something else."""
_LOOK_S = 0.5
_REST_S = 0.2
"""What is told of the end follows the end closely."""
_SILENT_TTLS = 3.0
"""Long enough to be given up for dead, and to come back."""


@click.command("chaos", short_help="Kill, freeze or cut off a part of a node on purpose, to see that the job survives it; asks.")
@click.argument("fault", type=click.Choice([k.value for k in FaultKind]))
@click.argument("node", shell_complete=options.complete_nodes)
@jobs.job_options
@click.option("--rank", type=click.IntRange(0), help="The worker with this global rank, not the node's first one.")
@click.option("--agent", is_flag=True, help="The node's agent instead of a worker; its workers end with it.")
@click.option("--for", "seconds", type=options.Duration(), metavar="DURATION", help="How long a partition lasts. [default: 3 lease times]")
@click.option("--deadline", type=options.Duration(), metavar="DURATION", help="Stop watching after this long (exit 4).")
@click.option("--detach", is_flag=True, help="Return once it is done to the node.")
@options.yes_option
def command(
    fault: str,
    node: str,
    job: str | None,
    etcd: str | None,
    rank: int | None,
    agent: bool,
    seconds: float | None,
    deadline: float | None,
    detach: bool,
    yes: bool,
) -> None:
    """Inject FAULT into NODE and watch until the job trains again.

    kill: SIGKILL to a worker (or the agent). freeze: SIGSTOP, for good. partition: for a while the node is silent; its agent reaches no
    store, its workers answer nobody, and others must give it up for dead. NODE's own agent does it, on whichever host that is.
    """
    kind = FaultKind(fault)
    if kind is FaultKind.PARTITION and (agent or rank is not None):
        raise UsageError("a partition cuts the whole node off: --agent and --rank go with kill and freeze")
    if kind is not FaultKind.PARTITION and seconds is not None:
        raise UsageError("--for goes with partition: who is killed or frozen stays so")
    if agent and rank is not None:
        raise UsageError("--agent and --rank exclude each other")
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        wanted = _wanted(current, kind, options.hosts(current, [node]), rank, agent, seconds)
        what = _what(current, wanted)
        options.confirm(f"{what}: {_outlook(current, wanted)}. Do it?", yes)
        with closing(events.Stream(connection, read.read_events(connection))) as stream:
            click.echo(_inflict(connection, current, wanted, what))
            if not detach and _matters(current, wanted):
                _watch(connection, stream, current, deadline)


def _wanted(job: Job, kind: FaultKind, hosts: Sequence[Host], rank: int | None, agent: bool, seconds: float | None) -> Fault:
    """Raises RefusedError, NotFoundError, UsageError."""
    jobs.still_running(job)
    if len(hosts) != 1:
        raise UsageError("one node at a time")
    member = job.members.get(hosts[0])
    if member is None or job.spec is None:
        raise RefusedError(f"{hosts[0]} does not answer: there is no agent that could do it")
    old = job.faults.get(hosts[0])
    if old is not None and not old.told and old.incarnation == member.value.incarnation:
        raise RefusedError(f"{hosts[0]} has not carried out what was asked of it before; try again in a moment")
    if job.pause is not None and job.map is not None and job.map.slot_of_host(hosts[0]) is not None:
        raise RefusedError("automatic replacement is paused, nobody would take the ranks over; `tmrun resume` first")
    slot = job.map.slot_of_host(hosts[0]) if job.map else None
    ranks = job.spec.ranks(slot) if slot is not None else ()
    if rank is not None and rank not in ranks:
        raise NotFoundError(f"{hosts[0]} has no rank {rank}; it has {ranks_named(ranks) if ranks else 'none'}")
    local = ranks.index(rank) if rank is not None else 0
    lasts = seconds or _SILENT_TTLS * job.spec.lease_ttl_s if kind is FaultKind.PARTITION else 0.0
    return Fault(f"c-{secrets.token_hex(3)}", hosts[0], member.value.incarnation, kind, agent, local, lasts)


def _what(job: Job, fault: Fault) -> str:
    slot = job.map.slot_of_host(fault.host) if job.map else None
    worker = f"rank {job.spec.ranks(slot)[fault.local_rank]}" if job.spec and slot is not None else f"worker {fault.local_rank}"
    victim = "the agent" if fault.agent else worker
    if fault.kind is FaultKind.PARTITION:
        return f"cut {fault.host} off for {fault.seconds:g} s"
    return f"{fault.kind.value} {victim} of {fault.host}"


def _outlook(job: Job, fault: Fault) -> str:
    """What has to be expected, for the question."""
    slot = job.map.slot_of_host(fault.host) if job.map else None
    if slot is None or job.spec is None:
        return "it holds no ranks; training goes on"
    ranks, victim = ranks_named(job.spec.ranks(slot)), job.spec.ranks(slot)[fault.local_rank]
    if not job.movable:
        again = fault.kind is FaultKind.KILL and not fault.agent and policy.repeated(job.maps, victim, Cause.KILLED)
        if again and job.program_restarts >= job.spec.max_restarts:
            return f"rank {victim} was killed before, and the script has not reached run.steps: the job ends (--max-restarts)"
        return "the script has not reached run.steps: all workers restart"
    if not planner.standbys(job):
        return f"no standby is warm, nobody can take {ranks} over yet"
    return f"a warm standby takes {ranks} over"


def _inflict(connection: Connection, current: Job, fault: Fault, what: str) -> str:
    """Ask, and wait until the agent has taken it; what it does. Raises RefusedError, TmrunError."""
    told = Event(time.time(), fault.host, f"chaos: {what}, asked for by an operator", EventKind.CHAOS.value)
    if not connection.store.commit(transactions.inflict(current, fault, told)).succeeded:
        raise RefusedError(f"the state of {fault.host} changed meanwhile; look at `tmrun nodes` and try again")
    end = time.monotonic() + _TAKE_S
    while time.monotonic() < end:
        taken = _taken(connection, fault)
        if taken:
            return taken
        time.sleep(0.05)
    if connection.store.commit(transactions.withdraw_fault(current, fault)).succeeded:
        raise TmrunError(f"the agent of {fault.host} did not take it within {_TAKE_S:g} s; it is taken back, nothing was done")
    taken = _taken(connection, fault)
    if not taken:
        raise OutcomeUnknown(f"{fault.host} was asked for another fault meanwhile; whether it did this one is not known")
    return taken


def _taken(connection: Connection, fault: Fault) -> str:
    known = connection.read().faults.get(fault.host)
    return known.told if known is not None and known.id == fault.id else ""


def _matters(job: Job, fault: Fault) -> bool:
    """Whether anybody can be expected to be moved."""
    if job.map is None or job.map.slot_of_host(fault.host) is None or job.spec is None:
        return False
    seen = job.spec.hang_timeout != "off" and job.spec.hang_action == "replace"
    if fault.kind is FaultKind.FREEZE and not fault.agent and not seen:
        click.echo("nobody will do anything about it: the job was launched with --hang-timeout off, or --hang-action notify", err=True)
        return False
    if fault.kind is FaultKind.PARTITION and fault.seconds < FENCE_SHARE * job.spec.lease_ttl_s:
        click.echo("shorter than half a lease time: training stands still for so long, and goes on", err=True)
        return False
    return True


def _watch(connection: Connection, stream: events.Stream, before: Job, deadline_s: float | None) -> None:
    """Tell what happens until the job trains again. Raises StillRunningError, TmrunError."""
    began = time.monotonic()
    try:
        while not (outcome := _outcome(connection, before)):
            if deadline_s is not None and time.monotonic() - began > deadline_s:
                raise StillRunningError(f"not over within {deadline_s:g} s; see `tmrun status`")
            _tell(stream.next(_LOOK_S))
        while (told := stream.next(_REST_S)) is not None:
            _tell(told)
        click.echo(outcome)
    except KeyboardInterrupt:
        click.echo("tmrun: not watching any more; see `tmrun status`", err=True)
        raise


def _tell(told: list[dict[str, Any]] | None) -> None:
    for event in told or ():
        click.echo(views.event_line(event))


def _outcome(connection: Connection, before: Job) -> str:
    """What became of it; empty: it is not over. Raises TmrunError."""
    status: dict[str, Any] = read.read_status(connection)
    if status["exit_code"] is not None:
        raise TmrunError(f"the job has ended ({status['state']}: {status['reason']})")
    row = status["last"]
    if status["epoch"] <= before.epoch or status["state"] != JobState.RUNNING.value or status["migration"] is not None:
        return ""
    if row["cause"] != Kind.RESTART.value and row["pause_s"] is None:
        return ""
    again = f"all workers started again ({row['reason']})" if row["cause"] == Kind.RESTART.value else launch_view.migrated(row)
    return f"epoch {status['epoch']}: {again}"
