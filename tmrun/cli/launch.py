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
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tmrun import procs, witness
from tmrun.cli import failed, jobs, own_store, place, switch
from tmrun.cli.care import Care
from tmrun.cli.console import Console
from tmrun.cli.hooks import Wanted
from tmrun.cli.keep import Keep
from tmrun.cli.runtime_dir import make_runtime_dir
from tmrun.cli.wards import Wards
from tmrun.config import AgentConfig, NoticeSources, beacon_path
from tmrun.core import codec, environment, policy, states, transactions
from tmrun.core.errors import OutcomeUnknown, RefusedError, StoreError, StoreUnavailable, TmrunError, UsageError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, fold
from tmrun.core.model import FENCE_SHARE, End, Host, JobState, Member, Spec
from tmrun.core.plural import many
from tmrun.core.streams import Output
from tmrun.store.access import open_store
from tmrun.store.api import Changed, Store, WatchEvent
from tmrun.store.burial import bury
from tmrun.tui.footer import Footer

ENV_NODE = "TMRUN_NODE_MARKER"
"""Marks the processes of one node of one launch."""
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""Passed on to the workers of this host; the job goes on."""
_LEAVE_WAIT_S = 15.0
_LOOK_S = 1.0
"""The store is asked so often whether the job has ended (and whether it answers); a watch usually tells at once."""
STORE_DEADLINE_S = 5.0
GAVE_UP = StoreError.exit_code
"""How an agent ends that has nothing left to do and no store."""
_FLAGS = {"node_wait_s": "join_timeout", "join_wait_s": "last_call_timeout"}
"""What gives a field of the spec that is not called like it."""
_FROZEN_S = 2.0
"""However short the lease: a loaded machine may not let an agent beat for that long."""


@dataclass(frozen=True, slots=True)
class Where:
    """``local``: how many nodes to run here, named node0..; 0: this host is one node, called ``name`` (empty: as the host).

    ``node_rank``: the slot it wants, -1: any. ``master_port``: MASTER_PORT if it gets slot 0, 0: any.
    """

    local: int
    name: str
    address: str | None
    node_rank: int = -1
    master_port: int = 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes that run here."""
        return tuple(f"node{i}" for i in range(self.local)) or (self.name,)


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything a launch needs to know, checked."""

    job: str
    spec: Spec
    where: Where
    store: own_store.Choice
    care: Care
    join_timeout_s: float
    grace_s: float
    output: Output
    signals: tuple[int, ...]
    """Those that end the job; they are passed on to the workers."""
    cpus: tuple[str, ...]
    """Of each worker of this host (``numa``); empty: all."""
    metrics: tuple[str, int] | None = None
    """Host and first port on which the agents of this machine are asked for their metrics."""
    hooks: Wanted = field(default_factory=Wanted)


def launch(wanted: Launch) -> int:
    """Run until the job ends; returns the exit code."""
    try:
        return _launch(wanted)
    except TmrunError as error:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            with suppress(OSError):
                failed.leave_error_file((), End(JobState.FAILED, error.exit_code, str(error)), path)
        raise


def _launch(wanted: Launch) -> int:
    with ExitStack() as stack:
        _have_standard_input()
        interrupts: queue.SimpleQueue[int] = queue.SimpleQueue()
        forwards: queue.SimpleQueue[int] = queue.SimpleQueue()
        _listen(wanted.signals, interrupts)
        _listen([n for n in FORWARDED if n not in wanted.signals], forwards)
        marker = uuid.uuid4().hex
        folder = make_runtime_dir(wanted.job, stack)
        listener = None if wanted.where.local else stack.enter_context(witness.listen())
        stack.callback(_start_sweeper(marker, folder, listener))
        procs.adopt_orphans()
        switch.build_beside(stack)
        own = own_store.provide(wanted.store, folder, stack, interrupts, wanted.join_timeout_s)
        store = open_store(own.access, STORE_DEADLINE_S)
        stack.callback(store.close)
        jobs.announce(folder, jobs.LocalJob(wanted.job, os.getpid(), own.access))
        if not wanted.where.local and not wanted.where.name:
            name = place.free_name(wanted.job, socket.gethostname(), stack)
            wanted = replace(wanted, where=replace(wanted.where, name=name))
        console = Console(jobs.Connection(store, Keys(wanted.job)), wanted.where.hosts, wanted.hooks, Footer())
        stack.callback(console.close)
        launcher = Launcher(wanted, folder, marker, own, store, interrupts, forwards, console, listener)
        launcher.prepare()
        return launcher.run()


def _have_standard_input() -> None:
    """Workers inherit it; where there is none (``<&-``) it must not become the number of a file of ours."""
    try:
        os.fstat(0)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)


def _listen(numbers: Iterable[int], into: queue.SimpleQueue[int]) -> None:
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda n, _: into.put(n))


def _start_sweeper(marker: str, folder: Path, listener: socket.socket | None) -> Callable[[], None]:
    """Returns what to call at the end: it waits until everything is clean."""
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-S", "-E", "-m", "tmrun.sweeper", str(read_end), marker, str(folder)]
    passed = [read_end]
    if listener is not None:
        argv.append(str(listener.fileno()))
        passed.append(listener.fileno())
    root = str(Path(procs.__file__).parent.parent)
    sweeper = subprocess.Popen(argv, pass_fds=passed, start_new_session=True, stdin=subprocess.DEVNULL, cwd=root)
    os.close(read_end)

    def finish() -> None:
        os.write(write_end, b"orderly")
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
    forwards: queue.SimpleQueue[int]
    console: Console
    listener: socket.socket | None = None
    """Where the sweeper will answer after us."""
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    heard: int = 0
    """The signal that ends this launch; a second one does not wait. 0: there was none."""
    answered: bool = False
    """The job has heard of it."""
    departing: bool = False
    """This host's agents end their part."""
    _look_at: float = 0.0
    _own: set[int] = field(default_factory=procs.children)
    inbox: queue.SimpleQueue[WatchEvent | None] = field(default_factory=queue.SimpleQueue)
    """Events of the job; None: an agent of ours has ended."""
    _started: dict[str, float] = field(default_factory=dict)
    _lives: dict[str, list[float]] = field(default_factory=dict)
    _again: dict[str, float] = field(default_factory=dict)
    """host -> when its agent is started again."""
    _silent_since: float | None = None
    """When the store first did not answer; None: it does."""

    def __post_init__(self) -> None:
        frozen_s = max(_FROZEN_S, self.wanted.spec.lease_ttl_s * FENCE_SHARE)
        self.wards = Wards(frozen_s, self.marker, ENV_NODE, lambda: self.inbox.put(None), self.console.say)
        self.keep = Keep(tuple(map(Host, self.wanted.where.hosts)), self.wanted.spec.node_wait_s, self._read, self.console.say)

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
        difference = "" if job.spec is None else _difference(job.spec, self.wanted.spec)
        if difference:
            job_id = self.wanted.job
            raise UsageError(f"job {job_id} was launched with {difference}; if that launch is over, end it with `tmrun stop {job_id}`")

    def run(self) -> int:
        """Start the agents, tell the story, clean up. The store outlives every agent that still needs to read the end."""
        self._banner()
        self.store.watch(self.keys.events, self.inbox.put)
        self.store.watch(self.keys.end, self._ended)
        self.wards.start()
        for host in self.wanted.where.hosts:
            self._start(host)
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
            self.console.say(told)
        procs.reap_orphans(self._own | self.console.hooks.pids)
        if (
            time.monotonic() < self._look_at
            and self.interrupts.empty()
            and self.forwards.empty()
            and all(a.poll() is None for a in self.agents.values())
            and not self._due()
        ):
            return None
        self._look_at = time.monotonic() + _LOOK_S
        try:
            code = self._look()
            if code is None:
                self.console.show()
        except (StoreUnavailable, OutcomeUnknown) as error:
            return self._without_store(error)
        self._silent_since = None
        self.console.store_answers()
        return code

    def _without_store(self, error: StoreError) -> int | None:
        """The exit code if our agents have ended by themselves (the store's host leaves first at the end of a job)."""
        self._silent_since = time.monotonic() if self._silent_since is None else self._silent_since
        codes = [agent.poll() for agent in self.agents.values()]
        ended = [c for c in codes if c is not None]
        if len(ended) == len(codes) and self.departing:
            return 128 + self.heard
        if len(ended) == len(codes) and not self._returns(ended):
            lost = f"the store of job {self.wanted.job} is lost"
            if any(c < 0 for c in ended) or not ended:
                raise StoreError(f"{lost}, and agents of this host have died: {error}") from None
            if GAVE_UP in ended:
                raise StoreError(f"{lost}: nothing is left to do here, and it was waited for; {error}") from None
            return max(ended)
        if self.heard and not self.answered:
            self._depart(f"{signal.Signals(self.heard).name} while the store does not answer: this host ends its workers")
        self.console.store_is_silent(f"{error.brief}; training goes on while its steps do")
        return None

    def _returns(self, ended: list[int]) -> bool:
        """The store that is silent is only this host's, which starts it again, and no agent was killed or has given it up; or others needed
        it just now; or an agent is to be started again, which would wait for it as long."""
        alone = bool(self.own.members) and self.own.hosts <= 1
        silent_s = 0.0 if self._silent_since is None else time.monotonic() - self._silent_since
        planned = bool(self._again) and silent_s < self.wanted.join_timeout_s
        return self.keep.outlasts or planned or (alone and bool(ended) and all(code >= 0 and code != GAVE_UP for code in ended))

    def _read(self) -> Job:
        return fold(self.keys, self.store.list(self.keys.ctl).entries)

    def _banner(self) -> None:
        spec, where = self.wanted.spec, self.own.access.endpoints
        store = "etcd" if self.wanted.store.existing else "embedded etcd"
        standby = f" + {spec.standby} standby" if spec.standby else ""
        nodes = "node" if spec.nnodes + spec.standby == 1 else "nodes"
        self.console.say(f"job {self.wanted.job}: {spec.nnodes} active{standby} {nodes}, {many(spec.world, 'worker')}; {store} {where}")

    def _start(self, host: str) -> None:
        try:
            self.agents[host] = agent = self._start_agent(host, self.wanted.where.hosts.index(host))
        except OSError as error:
            raise TmrunError(f"the agent of {host} cannot be started, with its files in {self.folder}: {error}") from None
        self._own.add(agent.pid)
        self._started[host] = time.monotonic()
        self._again.pop(host, None)

    def _start_agent(self, host: str, index: int) -> subprocess.Popen[bytes]:
        wanted, where = self.wanted, self.wanted.where
        address = place.address(where.address, self.own.access.endpoints)
        config = AgentConfig(
            wanted.job,
            host,
            self.own.access,
            address,
            str(self.folder),
            self.marker,
            os.getpid(),
            wanted.spec.command,
            wanted.care.labels().of(host),
            wanted.grace_s,
            metrics=_metrics_of(wanted.metrics, index),
            node_rank=where.node_rank,
            master_port=where.master_port if index == 0 else 0,
            output=wanted.output,
            signals=wanted.signals,
            cpus=wanted.cpus,
            store_wait_s=wanted.join_timeout_s,
            notices=self._notices(host),
            witness="" if self.listener is None else witness.record(address, self.listener, self.marker),
            store_members=self.own.hosts,
            witness_fd=-1 if self.listener is None else self.listener.fileno(),
        )
        path = self.folder / f"{host}.json"
        config.save(path)
        env = {**os.environ, procs.ENV_MARKER: self.marker, ENV_NODE: f"{self.marker}/{host}"}
        argv = [sys.executable, "-m", "tmrun_agent", str(path)]
        held = () if self.listener is None else (self.listener.fileno(),)
        return self.wards.watch(host, argv, env, beacon_path(str(self.folder), host), held)

    def _notices(self, host: str) -> NoticeSources:
        """What the user named, and a file in the runtime folder that is always looked at."""
        sources = self.wanted.care.notices()
        return replace(sources, files=(*sources.files, str(self.folder / f"{host}.notice")))

    # -- while it runs --------------------------------------------------------------------------------------------------------------
    def _look(self) -> int | None:
        """One look at the end of the job and at our agents; the exit code once the job has ended."""
        self._interrupted()
        self._forward()
        ended = {host: code for host, agent in self.agents.items() if (code := agent.poll()) is not None}
        found = self.store.get(self.keys.end)  # after that look: an agent that ended with the job needs no burial
        if found is not None:
            end = codec.decode(End, found.value)
            return states.final_exit_code(end.state, end.exit_code)
        if self.departing:
            return 128 + self.heard if len(ended) == len(self.agents) else None
        for host, code in ended.items():
            self._bury(host, code)
            del self.agents[host]  # only now: a burial that the store did not take is tried again
            self._plan_return(host, code)
        self._start_again()
        if not self.agents and not self._again and not (self.own.members and self.keep.needed()):
            others = self._read().members
            raise TmrunError("the agent of this host ended; the job goes on without it" if others else "all agents of the job have ended")
        return None

    def _start_again(self) -> None:
        for host in self._due():
            try:
                self._start(host)
            except TmrunError as error:
                self._again[host] = time.monotonic() + policy.MAX_RESTART_DELAY_S
                self.console.say(f"{error}; tried again in {policy.MAX_RESTART_DELAY_S:.0f} s")

    def _due(self) -> list[str]:
        """Agents that are to be started again now."""
        return [host for host, at in self._again.items() if at <= time.monotonic()]

    def _ended(self, event: WatchEvent) -> None:
        """From the watch's thread: there is something to look at."""
        if isinstance(event, Changed):
            self._look_at = 0.0

    def _interrupted(self) -> None:
        """Raises Interrupted at the second signal, StoreError while the first one cannot be told."""
        while not self.interrupts.empty():
            number = self.interrupts.get()
            if self.heard:
                raise own_store.interrupted(number)
            self.heard = number
        if not self.heard or self.answered:
            return
        if self.heard == signal.SIGTERM and self._others_go_on():
            self._depart("SIGTERM: this host leaves; its ranks move, or its workers end, and the job goes on without it")
        else:
            self._stop(self.heard)
        self.answered = True

    def _stop(self, number: int) -> None:
        end = End(JobState.STOPPED, 128 + number, f"{signal.Signals(number).name} to a launcher")
        self.store.commit(transactions.end_job(Job(self.keys), end, as_leader=False))
        self.console.say("stopping the job; once more kills it")

    def _others_go_on(self) -> bool:
        """Other hosts are in the job, and do not need this one for the store: then SIGTERM means that this machine is wanted back."""
        return not self.own.members and any(host not in self.wanted.where.hosts for host in self._read().members)

    def _depart(self, why: str) -> None:
        if self.departing:
            return
        self.departing = True
        self.console.say(f"{why}; once more kills its workers")
        for agent in self.agents.values():
            agent.terminate()

    def _forward(self) -> None:
        while not self.forwards.empty():
            number = self.forwards.get()
            able = [agent for host, agent in self.agents.items() if self.wards.beats(host)]
            for agent in able:
                agent.send_signal(number)
            self.console.say(f"{signal.Signals(number).name} passed on to the workers of {many(len(able), 'node')}")

    def _bury(self, host: str, code: int) -> None:
        """This agent was ours, so we know: make sure that its workers are gone, then say so and end its lease at once."""
        gone = procs.sweep(f"{self.marker}/{host}", ENV_NODE)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        entry = self.store.get(self.keys.member(host))
        if entry is None:
            self.console.say(f"agent {host} ended ({how}) before it joined")
            return
        value = codec.decode(Member, entry.value)
        if not gone:
            self.console.say(f"agent {host} is gone ({how}), but a process of its workers cannot be killed; its lease decides")
            return
        self.console.say(f"agent {host} is gone ({how}); its workers are confirmed dead")
        bury(self.store, self.keys, value.host, value.incarnation)

    def _plan_return(self, host: str, code: int) -> None:
        """Who was killed comes back as a new life, if it can, and who had given up a store that answers now; others had a reason."""
        if code >= 0 and code != GAVE_UP:
            return
        lives = self._lives.setdefault(host, [])
        lives.append(time.monotonic() - self._started[host])
        delay = policy.restart_delay(lives)
        self._again[host] = time.monotonic() + delay
        self.console.say(f"agent {host} is started again in {delay:.0f} s")

    def _wait(self, seconds: float) -> None:
        """Tell events as they come."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                event = self.inbox.get(timeout=left)
            except queue.Empty:
                return
            if event is None:
                return
            self.console.tell(event)

    # -- the end --------------------------------------------------------------------------------------------------------------------
    def _leave(self) -> None:
        """Let the agents end by themselves; with an embedded store also the other hosts' agents, which still have to read the end."""
        deadline = time.monotonic() + self.wanted.grace_s + _LEAVE_WAIT_S
        while time.monotonic() < deadline and self._busy():
            if not self.interrupts.empty():
                break
            self._wait(0.05 if any(a.poll() is None for a in self.agents.values()) else 0.5)
        self._wait(0.05)
        try:
            self.console.summary(self._read())
            self._report()
        except StoreError:
            pass  # its host has left already

    def _busy(self) -> bool:
        if any(a.poll() is None for a in self.agents.values()):
            return True
        try:
            return bool(self.own.members) and bool(self._read().members)
        except StoreError:
            return False

    def _report(self) -> None:
        """What ended a job that failed, and where."""
        job = self._read()
        if job.end is None or job.end.state is not JobState.FAILED:
            return
        failures = failed.read(self.store, job)
        if failures:
            title = " ".join(environment.target(self.wanted.spec.command))
            print(failed.report(title, failures, job.restarts), file=sys.stderr, flush=True)
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path:
            try:
                failed.leave_error_file(failures, job.end, path)
            except OSError as error:
                self.console.say(f"cannot write $TORCHELASTIC_ERROR_FILE: {error}")

    def _kill_agents(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGHUP)  # leave at once; SIGTERM would ask for a drain first
        for agent in self.agents.values():
            try:
                agent.wait(2)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def _metrics_of(wanted: tuple[str, int] | None, index: int) -> str:
    """Where the n-th agent of this machine listens; port 0: wherever there is room."""
    if wanted is None:
        return ""
    host, port = wanted
    return f"{host}:{port + index if port else 0}"


def _difference(theirs: Spec, ours: Spec) -> str:
    """In what another host's launch is not ours; empty: in the program's arguments at most, and in where its script lies."""
    if _program(theirs) != _program(ours):
        return f"the program {_program(theirs)!r}, here it is {_program(ours)!r}: a job runs the same one on every host"
    for name in (each.name for each in fields(Spec) if each.name != "command"):
        if (there := getattr(theirs, name)) != (here := getattr(ours, name)):
            return f"{_FLAGS.get(name, name)} {there}, here it is {here}: use the same flags on every host"
    return ""


def _program(spec: Spec) -> str:
    *how, name = environment.target(spec.command)
    return " ".join((*how, Path(name).name))
