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
from tmrun.cli import jobs, place, read, tables
from tmrun.config import AgentConfig
from tmrun.core import codec, node, transactions
from tmrun.core.errors import StoreError, TmrunError, UsageError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, fold
from tmrun.core.model import End, Event, Host, JobState, Member, Obituary, Spec
from tmrun.core.txn import DeletePrefix, Put, Txn
from tmrun.store.api import Changed, WatchEvent
from tmrun.store.embedded import EmbeddedEtcd
from tmrun.store.etcd import EtcdStore

ENV_NODE = "TMRUN_NODE_MARKER"
"""Marks the processes of one node of one launch."""
_LEAVE_WAIT_S = 15.0


@dataclass(frozen=True, slots=True)
class Where:
    """``local``: how many nodes to run here, named node0..; 0: this host is one node, called ``name``."""

    etcd: str | None
    rdzv_endpoint: str | None
    local: int
    name: str
    address: str | None


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything a launch needs to know, checked."""

    job: str
    spec: Spec
    where: Where
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
        endpoint = _open_store(wanted, folder, stack, interrupts)
        store = EtcdStore(endpoint, deadline_s=5.0)
        stack.callback(store.close)
        jobs.announce(folder, jobs.LocalJob(wanted.job, endpoint, os.getpid()))
        launcher = Launcher(wanted, folder, marker, endpoint, store, interrupts)
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


def _open_store(wanted: Launch, folder: Path, stack: ExitStack, interrupts: queue.SimpleQueue[int]) -> str:
    where = wanted.where
    if where.etcd:
        return where.etcd
    if where.rdzv_endpoint is None:
        return stack.enter_context(EmbeddedEtcd(folder / "etcd")).url
    host, port = place.split_endpoint(where.rdzv_endpoint)
    url = place.url(host, port)
    if place.is_local(host):
        with place.one_starter(port):  # two launchers on one machine must not both start it
            if not place.answers(url):
                click.echo(f"tmrun: this host runs the store of the job, at {url}", err=True)
                return stack.enter_context(EmbeddedEtcd(folder / "etcd", host, port)).url
    _wait_for_store(url, wanted.join_timeout_s, interrupts)
    return url


def _wait_for_store(url: str, timeout_s: float, interrupts: queue.SimpleQueue[int]) -> None:
    click.echo(f"tmrun: waiting for the store at {url}", err=True)
    deadline = time.monotonic() + timeout_s
    while not place.answers(url):
        if not interrupts.empty():
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise StoreError(f"no store answered at {url} within {timeout_s:g} s; is the host with that address running the same command?")
        time.sleep(0.5)


@dataclass
class Launcher:
    """The launch, once there is a store."""

    wanted: Launch
    folder: Path
    marker: str
    endpoint: str
    store: EtcdStore
    interrupts: queue.SimpleQueue[int]
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stopping: int = 0
    _own: set[int] = field(default_factory=procs.children)
    inbox: queue.SimpleQueue[WatchEvent] = field(default_factory=queue.SimpleQueue)

    @property
    def keys(self) -> Keys:
        """Keys of the job."""
        return Keys(self.wanted.job)

    def prepare(self) -> None:
        """Write the spec, or check that it is the one the other hosts launched with. Raises UsageError."""
        job = self._read()
        if job.end is not None and not job.members:
            self.store.commit(Txn((), (DeletePrefix(self.keys.root),), "clear an ended job of the same name"))
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
            while (code := self._look(self._read())) is None:
                self._wait(0.2)
            self._leave()
            return code
        except StoreError as error:
            return self._without_store(error)
        finally:
            self._kill_agents()

    def _without_store(self, error: StoreError) -> int:
        """Its host leaves first at the end of a job: our agents had read the end and ended with its code. Else it is lost."""
        codes = {agent.poll() for agent in self.agents.values()}
        code = codes.pop() if len(codes) == 1 else None
        if code is None or code < 0:
            raise StoreError(f"lost the store of job {self.wanted.job}: {error}") from None
        return code

    def _read(self) -> Job:
        return fold(self.keys, self.store.list(self.keys.ctl).entries)

    def _banner(self) -> None:
        spec, where = self.wanted.spec, self.wanted.where
        store = "etcd" if where.etcd else "embedded etcd"
        standby = f" + {spec.standby} standby" if spec.standby else ""
        click.echo(
            f"tmrun: job {self.wanted.job}: {spec.nnodes} active{standby} nodes, {spec.world} workers; {store} {self.endpoint}", err=True
        )

    def _start_agent(self, host: str) -> subprocess.Popen[bytes]:
        config = AgentConfig(
            self.wanted.job, host, self.endpoint, place.address(self.wanted.where.address, self.endpoint), str(self.folder), self.marker,
            os.getpid(), labels=self.wanted.labels, grace_s=self.wanted.grace_s,
        )  # fmt: skip
        path = self.folder / f"{host}.json"
        config.save(path)
        env = {**os.environ, procs.ENV_MARKER: self.marker, ENV_NODE: f"{self.marker}/{host}"}
        return subprocess.Popen([sys.executable, "-m", "tmrun_agent", str(path)], env=env, start_new_session=True, stdin=subprocess.DEVNULL)

    # -- while it runs --------------------------------------------------------------------------------------------------------------
    def _look(self, job: Job) -> int | None:
        """One look at everything; the exit code once the job has ended."""
        self._interrupted(job)
        procs.reap_orphans(self._own)
        for host, agent in list(self.agents.items()):
            code = agent.poll()
            if code is not None and job.end is None:
                del self.agents[host]
                self._bury(job, host, code)
        if job.end is not None:
            return node.final_exit_code(job.end.state, job.end.exit_code)
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
        procs.sweep(f"{self.marker}/{host}", ENV_NODE)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        member = job.members.get(Host(host))
        if member is None:
            click.echo(f"tmrun: agent {host} ended ({how}) before it joined", err=True)
            return
        value: Member = member.value
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
        self._summary()

    def _busy(self) -> bool:
        return any(a.poll() is None for a in self.agents.values()) or (self.wanted.where.etcd is None and bool(self._read().members))

    def _summary(self) -> None:
        rows = read.read_history(jobs.Connection(self.store, self.keys), self._read())
        for row in rows:
            if row["leaver"]:
                click.echo(f"tmrun: {tables.migration_line(row)}", err=True)

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
