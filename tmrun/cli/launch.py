"""One launcher: a store, the agents of this host, the job's story on the console, and nothing left behind however it ends.

    sweeper ── holds the runtime folder; outlives the launcher by a moment
    launcher ─┬─ etcd (embedded; under its own guard)
              └─ agent a node ── workers

May not know: the protocol beyond "write the spec, wait for the end, confirm a death".
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import click

from tmrun import procs
from tmrun.cli import jobs, own_store, place, read
from tmrun.config import AgentConfig
from tmrun.core import codec, report, transactions
from tmrun.core.errors import OutcomeUnknown, RefusedError, StoreError, StoreUnavailable, TmrunError, UsageError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, fold
from tmrun.core.model import End, Event, Host, JobState, Member, Obituary, Spec
from tmrun.core.txn import Put, Txn
from tmrun.store.access import open_store
from tmrun.store.api import Changed, Store, WatchEvent
from tmrun.tui import timeline

ENV_NODE = "TMRUN_NODE_MARKER"
"""Marks the processes of one node of one launch."""
_LEAVE_WAIT_S = 15.0
STORE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Where:
    """``local``: how many nodes to run here, named node0..; 0: this host is one node, called ``name``."""

    local: int
    name: str
    address: str | None


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything a launch needs to know, checked."""

    job: str
    spec: Spec
    where: Where
    store: own_store.Choice
    labels: dict[str, str]
    join_timeout_s: float
    grace_s: float


def launch(wanted: Launch) -> int:
    """Run until the job ends; returns the exit code."""
    with ExitStack() as stack:
        interrupts: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda n, _: interrupts.put(n))
        marker = uuid.uuid4().hex
        folder = jobs.make_runtime_dir(wanted.job)
        stack.callback(_start_sweeper(marker, folder))
        procs.adopt_orphans()
        own = own_store.provide(wanted.store, folder, stack, interrupts, wanted.join_timeout_s)
        store = open_store(own.access, STORE_DEADLINE_S)
        stack.callback(store.close)
        jobs.announce(folder, jobs.LocalJob(wanted.job, os.getpid(), own.access))
        launcher = Launcher(wanted, folder, marker, own, store, interrupts)
        launcher.prepare()
        return launcher.run()


def _start_sweeper(marker: str, folder: Path) -> Callable[[], None]:
    """Returns what to call at the end: it waits until everything is clean."""
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-S", "-E", "-m", "tmrun.sweeper", str(read_end), marker, str(folder)]
    root = str(Path(procs.__file__).parent.parent)
    sweeper = subprocess.Popen(argv, pass_fds=(read_end,), start_new_session=True, stdin=subprocess.DEVNULL, cwd=root)
    os.close(read_end)

    def finish() -> None:
        os.close(write_end)
        sweeper.wait()

    return finish


@dataclass
class Launcher:
    """The launch, once there is a store."""

    wanted: Launch
    folder: Path
    marker: str
    own: own_store.OwnStore
    store: Store
    interrupts: queue.SimpleQueue[int]
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stopping: int = 0
    _silent: bool = False
    _own: set[int] = field(default_factory=procs.children)
    inbox: queue.SimpleQueue[WatchEvent] = field(default_factory=queue.SimpleQueue)

    @property
    def keys(self) -> Keys:
        """Keys of the job."""
        return Keys(self.wanted.job)

    def prepare(self) -> None:
        """Write the spec, or check that it is the one the other hosts launched with. Raises UsageError."""
        job = self._read()
        deadline = time.monotonic() + 2 * self.wanted.spec.lease_ttl_s
        while job.end is not None:
            if not job.members:
                self.store.commit(transactions.clear(job))
            elif time.monotonic() > deadline:
                raise RefusedError(
                    f"job {self.wanted.job} has ended, but {', '.join(job.members)} still belongs to it; choose another --job"
                )
            time.sleep(0.2)
            job = self._read()
        if job.spec is None and not self.store.commit(transactions.create_spec(job, self.wanted.spec)).succeeded:
            job = self._read()
        if job.spec is not None and job.spec != self.wanted.spec:
            raise UsageError(_difference(self.wanted.job, job.spec, self.wanted.spec))

    def run(self) -> int:
        """Start the agents, tell the story, clean up. The store outlives every agent that still needs to read the end."""
        self._banner()
        self.store.watch(self.keys.events, self.inbox.put)
        hosts = [f"node{i}" for i in range(self.wanted.where.local)] or [self.wanted.where.name]
        for host in hosts:
            self.agents[host] = self._start_agent(host)
            self._own.add(self.agents[host].pid)
        try:
            while (code := self._turn()) is None:
                self._wait(0.2)
            self._leave()
            return code
        finally:
            self._kill_agents()

    def _turn(self) -> int | None:
        """One look; a store that does not answer is waited for, as long as there are agents: training goes on without it."""
        told = self.own.tend()
        if told:
            click.echo(f"tmrun: {told}", err=True)
        try:
            code = self._look(self._read())
        except (StoreUnavailable, OutcomeUnknown) as error:
            return self._without_store(error)
        if self._silent:
            click.echo("tmrun: the store answers again", err=True)
        self._silent = False
        return code

    def _without_store(self, error: StoreError) -> int | None:
        """The exit code if our agents have ended by themselves (the store's host leaves first at the end of a job)."""
        codes = [agent.poll() for agent in self.agents.values()]
        ended = [c for c in codes if c is not None]
        if len(ended) == len(codes):
            if any(c < 0 for c in ended) or not ended:
                raise StoreError(f"the store of job {self.wanted.job} is lost, and agents of this host have died: {error}") from None
            return max(ended)
        if not self.interrupts.empty():
            click.echo("tmrun: interrupted while the store does not answer; this host leaves the job", err=True)
            raise KeyboardInterrupt
        if not self._silent:
            click.echo(f"tmrun: {error}; training goes on while its steps do", err=True)
        self._silent = True
        return None

    def _read(self) -> Job:
        return fold(self.keys, self.store.list(self.keys.ctl).entries)

    def _banner(self) -> None:
        spec, where = self.wanted.spec, self.own.access.endpoints
        store = "etcd" if self.wanted.store.existing else "embedded etcd"
        standby = f" + {spec.standby} standby" if spec.standby else ""
        click.echo(f"tmrun: job {self.wanted.job}: {spec.nnodes} active{standby} nodes, {spec.world} workers; {store} {where}", err=True)

    def _start_agent(self, host: str) -> subprocess.Popen[bytes]:
        address = place.address(self.wanted.where.address, self.own.access.endpoints)
        config = AgentConfig(
            self.wanted.job,
            host,
            self.own.access,
            address,
            str(self.folder),
            self.marker,
            os.getpid(),
            self.wanted.labels,
            self.wanted.grace_s,
        )
        path = self.folder / f"{host}.json"
        config.save(path)
        env = {"GRPC_VERBOSITY": "NONE", **os.environ, procs.ENV_MARKER: self.marker, ENV_NODE: f"{self.marker}/{host}"}
        return subprocess.Popen([sys.executable, "-m", "tmrun_agent", str(path)], env=env, start_new_session=True, stdin=subprocess.DEVNULL)

    # -- while it runs --------------------------------------------------------------------------------------------------------------
    def _look(self, job: Job) -> int | None:
        """One look at everything; the exit code once the job has ended."""
        self._interrupted(job)
        procs.reap_orphans(self._own)
        for host, agent in list(self.agents.items()):
            code = agent.poll()
            if code is not None and job.end is None:
                self._bury(job, host, code)
                del self.agents[host]  # only now: a burial that the store did not take is tried again
        if job.end is not None:
            return report.final_exit_code(job.end.state, job.end.exit_code)
        if not self.agents:
            raise TmrunError(
                "the agent of this host ended; the job goes on without it" if job.members else "all agents of the job have ended"
            )
        return None

    def _interrupted(self, job: Job) -> None:
        while not self.interrupts.empty():
            number = self.interrupts.get()
            self.stopping += 1
            if self.stopping > 1:
                raise KeyboardInterrupt
            reason = f"{signal.Signals(number).name} to a launcher"
            click.echo("tmrun: stopping the job; once more kills it", err=True)
            self.store.commit(transactions.end_job(job, End(JobState.STOPPED, 128 + number, reason), as_leader=False))

    def _bury(self, job: Job, host: str, code: int) -> None:
        """This agent was ours, so we know: make sure that its workers are gone, then say so and end its lease at once."""
        gone = procs.sweep(f"{self.marker}/{host}", ENV_NODE)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        member = job.members.get(Host(host))
        if member is None:
            click.echo(f"tmrun: agent {host} ended ({how}) before it joined", err=True)
            return
        value: Member = member.value
        if not gone:
            click.echo(f"tmrun: agent {host} is gone ({how}), but a process of its workers cannot be killed; its lease decides", err=True)
            return
        click.echo(f"tmrun: agent {host} is gone ({how}); its workers are confirmed dead", err=True)
        self.store.commit(Txn((), (Put(self.keys.obituary(host), codec.encode(Obituary(value.host, value.incarnation))),), "obituary"))
        entry = self.store.get(self.keys.member(host))
        if entry is not None and entry.lease and codec.decode(Member, entry.value).incarnation == value.incarnation:
            self.store.revoke(entry.lease)

    def _wait(self, seconds: float) -> None:
        """Tell events as they come."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                event = self.inbox.get(timeout=left)
            except queue.Empty:
                return
            self._tell(event)

    def _tell(self, event: WatchEvent) -> None:
        if isinstance(event, Changed) and event.value is not None:
            told = codec.decode(Event, event.value.value)
            click.echo(f"tmrun: {told.text}", err=True)

    # -- the end --------------------------------------------------------------------------------------------------------------------
    def _leave(self) -> None:
        """Let the agents end by themselves; with an embedded store also the other hosts' agents, which still have to read the end."""
        deadline = time.monotonic() + self.wanted.grace_s + _LEAVE_WAIT_S
        while time.monotonic() < deadline and self._busy():
            if not self.interrupts.empty():
                break
            self._wait(0.05)
        self._wait(0.05)
        try:
            self._summary()
        except StoreError:
            pass  # its host has left already

    def _busy(self) -> bool:
        if any(a.poll() is None for a in self.agents.values()):
            return True
        try:
            return bool(self.own.members) and bool(self._read().members)
        except StoreError:
            return False

    def _summary(self) -> None:
        rows = read.read_history(jobs.Connection(self.store, self.keys), self._read())
        for row in rows:
            if row["leaver"]:
                click.echo(f"tmrun: {timeline.line(row)}", err=True)

    def _kill_agents(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.terminate()
        for agent in self.agents.values():
            try:
                agent.wait(2)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def _difference(job: str, theirs: Spec, ours: Spec) -> str:
    for name in ("nnodes", "nproc", "standby", "command", "max_restarts", "lease_ttl_s"):
        if getattr(theirs, name) != getattr(ours, name):
            what = f"{name} {getattr(theirs, name)}, here it is {getattr(ours, name)}"
            return f"job {job} was launched with {what}: use the same command on every host"
    return f"job {job} was launched with other timeouts: use the same command on every host"
