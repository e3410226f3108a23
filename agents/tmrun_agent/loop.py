"""The one loop of an agent: learn, decide, act. One thread owns all state; feeders only put into its inbox.

Each turn: drain the inbox, fold the facts, execute what ``core.node`` wants until it wants nothing, and, if this agent is the
coordinator, one decision of ``core.coordinator``. May not know: how effects are carried out, what the decisions mean.
"""

from __future__ import annotations

import queue
import random
import signal
import time
from dataclasses import dataclass, field, replace
from functools import partial

from tmrun import wire
from tmrun.beacon import Beacon
from tmrun.config import AgentConfig
from tmrun.core import alone, conditions, coordinator, environment, preemption, reconcile, transactions
from tmrun.core import node as core
from tmrun.core.alone import Alone
from tmrun.core.decision import Timers
from tmrun.core.errors import LeaseGone, OutcomeUnknown, StoreError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, fold
from tmrun.core.model import Copies, Kind, Member, Seat, Sign, Timing, WorkerVote
from tmrun.core.story import EventKind, kind_of
from tmrun.core.txn import Txn
from tmrun.store.api import Store
from tmrun_agent import autopsy
from tmrun_agent.chaos import Chaos
from tmrun_agent.effects import Effects
from tmrun_agent.feeders import Fenced, Interrupted, LeaseLost, Parked, StoreMoved
from tmrun_agent.health import Health, Noticed
from tmrun_agent.inquest import Inquest
from tmrun_agent.ipc import WorkerSaid, WorkerServer
from tmrun_agent.lease import Lease
from tmrun_agent.logs import Logs
from tmrun_agent.master import MasterStore
from tmrun_agent.metrics import Metrics
from tmrun_agent.notices import GoesAway
from tmrun_agent.preload import Preload
from tmrun_agent.processes import Ended, Processes
from tmrun_agent.publisher import Publisher
from tmrun_agent.rest import Rest
from tmrun_agent.slowness import Slowness
from tmrun_agent.timers import FileTimers
from tmrun_agent.views import Views

TICK_S = 0.25
MAX_EFFECTS = 100
"""Far more than a turn ever needs; then the inbox is looked at again."""
OWN_NEWS_S = 0.5
"""The watch usually tells a node what it did itself within milliseconds."""
Item = StoreMoved | LeaseLost | Fenced | Parked | Interrupted | WorkerSaid | Ended | Noticed | GoesAway
Inbox = queue.SimpleQueue[Item]


@dataclass(kw_only=True)
class Agent:
    """An agent that is registered; ``run`` returns the job's exit code."""

    config: AgentConfig
    keys: Keys
    store: Store
    lease: Lease
    member: Member
    views: Views
    publisher: Publisher
    inbox: Inbox
    processes: Processes
    server: WorkerServer
    logs: Logs
    master: MasterStore
    metrics: Metrics
    health: Health
    beacon: Beacon
    file_timers: FileTimers | None
    patience_s: float
    """``Spec.node_wait_s``."""
    node: core.Node
    timers: Timers = field(default_factory=Timers)
    _steps: dict[int, tuple[int, float]] = field(default_factory=dict)
    """pid -> (step, its usual duration)."""
    _timings: dict[tuple[int, int], Timing] = field(default_factory=dict)
    _told_every: int = 0
    """Steps between two copies of a worker's state, as people were told."""
    _job: Job | None = None
    _told: str = ""
    _unanswered_at: float = 0.0
    """When the store last failed a request, by the lease's clock."""
    _campaign_at: float = 0.0
    _leaving: str = ""
    """Why this machine goes away."""
    _term_at: float = 0.0
    """When SIGTERM came; 0: it did not."""

    def __post_init__(self) -> None:
        self.preload = Preload(environment.target(self.config.command))
        self.rest = Rest()
        self.inquest = Inquest(self.store, self.keys, self.me, self.publisher.event)
        self.chaos = Chaos(self.me, self.store, self.processes, self.submit)
        self.slowness = Slowness(self.store, partial(self.publisher.event, kind=EventKind.NODE_SLOW), self.submit)
        self.effects = Effects(
            self.config, self.processes, self.server, self.publisher, self.logs, self.master, self.health, self.file_timers, self.submit
        )

    @property
    def me(self) -> Seat:
        """Who this agent is."""
        return self.member.seat

    def run(self) -> int:
        """Until the job has ended, or this agent has to leave it."""
        self.lease.watch(self)
        self.health.start()
        while True:
            code = self._turn()
            if code is not None:
                return code
            self._learn()

    def submit(self, txn: Txn) -> bool:
        """Run a transaction, then wait for the watch to tell what it did: the next decision must see it.

        When it failed, may or may not have been done, or the watch is slow: read anew.
        """
        try:
            result = self.store.commit(txn)
        except OutcomeUnknown:
            self.refresh()
            return False
        if result.succeeded and self.views.wait_for(txn, result.revision, OWN_NEWS_S):
            self._job = None
        else:
            self.refresh()
        return result.succeeded

    def refresh(self) -> None:
        """Re-read what this agent watches of the protocol state."""
        self.views.refresh()
        self._job = None

    # -- learning -------------------------------------------------------------------------------------------------------------------
    def _learn(self) -> None:
        try:
            item: Item = self.inbox.get(timeout=TICK_S)
        except queue.Empty:
            return
        while True:
            self._fold(item)
            try:
                item = self.inbox.get_nowait()
            except queue.Empty:
                return

    def _fold(self, item: Item) -> None:
        match item:
            case StoreMoved():
                self._job = None
            case Ended(death):
                self._bury(death)
            case WorkerSaid(pid, local_rank, message):
                self._hear(pid, local_rank, message)
            case Noticed(pids, signs):
                self._notice(pids, signs)
            case LeaseLost(lease):
                self.lease.lost(lease)
            case Fenced(reason):
                self._observe(core.Killing(f"fenced: {reason}"))
                self.publisher.event(f"{self.member.host} fenced itself: {reason}", EventKind.NODE_FENCED)
            case Parked(reason):
                self.publisher.event(f"{self.member.host}: {reason}; its workers wait with their state for the store")
            case GoesAway(reason):
                self._leaving = reason or ("SIGTERM" if self._term_at else "")
            case Interrupted(number):
                self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        """SIGTERM asks for a drain, as a preemption does, also if it comes twice (from the launcher, and from a scheduler that sends it to
        every process); everything else means now."""
        if number != signal.SIGTERM:
            self.lease.interrupted = number
        self._leaving, self._term_at = "SIGTERM", self._term_at or time.monotonic()

    def _notice(self, pids: tuple[int, ...], signs: tuple[Sign, ...]) -> None:
        job, group = self.job(), self.node.group
        if group is None or group.pids != pids or job.spec is None:
            return  # of a group that is over
        ranks = job.spec.ranks(group.slot)
        self._observe(core.WorkersStall(tuple(replace(s, rank=ranks[s.rank]) for s in signs)))

    def _bury(self, death: autopsy.Death) -> None:
        """A worker ended; if nobody wished it, people are told all that is known."""
        group, spec = self.node.group, self.job().spec
        if death.code and group is not None and spec is not None and group.unwished(death.pid):
            rank = spec.ranks(group.slot)[death.local_rank]
            self.publisher.failure(autopsy.failure(death, self.member.host, group.slot, rank, group.epoch))
        self._observe(autopsy.exited(death, self.health.step_of(death.pid)))

    def _observe(self, fact: core.Fact) -> None:
        self.node = core.observe(self.node, fact)

    def _hear(self, pid: int, local: int, message: wire.Message) -> None:
        group = self.node.group
        if group is None or pid not in group.pids:
            return  # of a group that is over
        match message:
            case wire.Progress(step, step_s):
                self._progress(group, pid, (step, step_s))
            case wire.Receiving(done, total):
                spec = self.job().spec
                if spec is not None:
                    self.publisher.receiving(spec.ranks(group.slot)[local], done, total)
            case wire.Switched():
                self._observe(core.WorkerJoined(local))
                self._timing(local, message)
            case wire.Resumed():
                self._timing(local, message)
            case wire.Copied(_, copies):
                self._copied(group, local, copies)
            case _:
                fact = self._fact(group, local, message)
                if fact is not None:
                    self._observe(fact)

    def _fact(self, group: core.Group, local: int, message: wire.Message) -> core.Fact | None:
        """What a message means for the node, if anything."""
        match message:
            case wire.Joined():
                return core.WorkerJoined(local)
            case wire.Warm():
                return core.WorkerWarm(local, message.machine, message.rehearsal)
            case wire.Measured(machine):
                return core.WorkerMeasured(local, machine)
            case wire.Left():
                return core.WorkerLeft(local)
            case wire.Prepared():
                return core.WorkerAnswered(local, message.migration, self._answer(group, local, message))
            case wire.Refused(migration, reason, again):
                return core.WorkerAnswered(local, migration, core.Answer(refused=reason, again=again))
            case wire.Suspect(step, text):
                return core.WorkerDoubts(local, f"a worker lost a connection in step {step} ({text})")
            case _:
                return None

    def _answer(self, group: core.Group, local: int, message: wire.Prepared) -> core.Answer:
        job = self.job()
        assert job.spec is not None
        worker = None
        if message.step is not None and message.next_step is not None:
            rank = job.spec.ranks(group.slot)[local]
            worker = WorkerVote(rank, message.step, message.next_step, message.covers, message.snapshots, message.witnessed, message.idle_s)
        return core.Answer(message.stop_step, worker, frozenset(message.groups))

    def _progress(self, group: core.Group, pid: int, told: tuple[int, float]) -> None:
        self._steps = {p: s for p, s in self._steps.items() if p in group.pids} | {pid: told}
        slowest = min(self._steps.values())
        self.publisher.progress(group.epoch, *slowest, self.health.busy_s)
        self.metrics.progress(*slowest)

    def _copied(self, group: core.Group, local: int, copies: Copies) -> None:
        self.metrics.copied(local, copies)
        if group.slot == 0 and local == 0 and copies.is_news(self._told_every):  # one rank speaks for all
            self._told_every = copies.every
            self.publisher.event(copies.text)

    def _timing(self, local: int, message: wire.Switched | wire.Resumed) -> None:
        job, group = self.job(), self.node.group
        assert job.spec is not None and group is not None
        rank = job.spec.ranks(group.slot)[local]
        known = self._timings.get((message.epoch, rank), Timing(rank, ""))
        if isinstance(message, wire.Switched):
            role = "joiner" if "bind" in message.phases else "stayer"
            known = replace(known, role=role, phases=dict(message.phases), bytes=message.bytes)
            known = replace(known, rebuilt=message.rebuilt, kept=message.kept)
        else:
            known = replace(known, redo_s=message.redo_s, pause_s=message.pause_s, resumed=True, cold=message.cold)
        self._timings[message.epoch, rank] = known
        self.publisher.timing(message.epoch, known)
        self.metrics.timing(message.epoch, self._cause(job, message.epoch), known)

    def _cause(self, job: Job, epoch: int) -> Kind:
        """Why an epoch came to be; the mirror may not have its map yet, but then it has the migration."""
        if job.map is not None and job.map.epoch == epoch:
            return job.map.kind
        return job.migration.value.kind if job.migration is not None else Kind.FAILURE

    # -- deciding and acting --------------------------------------------------------------------------------------------------------
    def job(self) -> Job:
        """The snapshot that decisions of this turn are made on."""
        if self._job is None:
            self._job = fold(self.keys, self.views.snapshot())
        return self._job

    def _turn(self) -> int | None:
        code = None
        try:
            self.metrics.seen(self.job(), store_answers=not self._told)
            code = self._alone()
            if code is None:
                code = self.lease.tend(self)
            if code is None:
                code = self._leave()
            if code is None:
                code = self._act()
            if code is None:
                self._coordinate()
                self._inquire()
                self.chaos.tend(self.job(), self.node.group)
            self.preload.tend(self._idle, time.monotonic())
            if (rested := self.rest.tend(self.node, time.monotonic())) is not None:
                self._observe(rested)
            self._tell_of_store()
        except LeaseGone:
            self.lease.lost(self.node.lease)
        except StoreError as error:
            self._unanswered_at = self.lease.clock()
            self._said(error.brief)
        return code

    def _alone(self) -> int | None:
        """What must be done also if the store does not answer."""
        self.processes.tend()
        group, term_s = self.node.group, time.monotonic() - self._term_at if self._term_at else None
        ending, ttl_s, grace_s = group is not None and bool(group.killed), self.lease.ttl_s, self.config.grace_s
        todo = alone.judge(
            term_s, self.lease.silent_s, runs=self.runs_a_slot, ending=ending, ttl_s=ttl_s, patience_s=self.patience_s, grace_s=grace_s
        )
        if todo is Alone.END_WORKERS:
            self.processes.kill(gently=True)
            self._observe(core.Killing(f"{preemption.GOES_AWAY}: {self._leaving}"))
        if todo is Alone.GIVE_UP and self.job().end is None:
            return StoreError.exit_code
        return 128 + signal.SIGTERM if todo is Alone.LEAVE else None

    def _leave(self) -> int | None:
        """Ask for a drain when this machine goes away; end when SIGTERM said so and nothing depends on this node any more."""
        job, term = self.job(), bool(self._term_at)
        forced = preemption.HANDOVER_S if term else self.config.notices.deadline_s
        txn = preemption.answer(job, self.me, self._leaving, forced, shutdown=term) if self.views.loaded else None
        if txn is not None and self.submit(txn):
            news = f"goes away ({self._leaving}): drain" if self._leaving else "stays after all: no drain"
            self.publisher.event(f"{self.me.host}: {news}", EventKind.NODE_LEAVES)
        if not term or self.runs_a_slot or not preemption.gone(self.job(), self.me):
            return None
        whole = fold(self.keys, self.store.list(self.keys.ctl).entries)
        if whole.end is None and preemption.abandoned(whole):  # the last one out
            self.submit(transactions.end_job(whole, preemption.ABANDONED, as_leader=False))
        return 128 + signal.SIGTERM

    def _act(self) -> int | None:
        for _ in range(MAX_EFFECTS):
            if not self._attend():
                return None  # the watch will tell
            effect = reconcile.reconcile(self.node, self.job())
            if effect is None:
                return None
            if isinstance(effect, core.Quit):
                return effect.exit_code
            if isinstance(effect, core.Spawn) and self.lease.silent:
                return None  # others may be about to take this slot
            if reconcile.unsure(self.node, self.job(), effect):
                effect = reconcile.reconcile(self.node, fold(self.keys, self.views.read()))
                if not isinstance(effect, core.Kill):
                    self.refresh()
                    return None
            facts = self.effects.execute(effect, self.node, self.job())
            if facts is None:
                return None  # nothing came of it; the next turn tries again, on what the store says then
            for fact in facts:
                self._observe(fact)
        self.publisher.event(f"{self.member.host}: {MAX_EFFECTS} effects in one turn; looking at the world again")
        return None

    def _attend(self) -> bool:
        """Watch what concerns this agent now; True when it has heard of all that."""
        job = self.job()
        if self.views.want(reconcile.concerns(self.node, job), everything=self._leads(job)):
            self._job = None
        return self.views.loaded

    def _leads(self, job: Job) -> bool:
        return job.leader is not None and job.leader.value.incarnation == self.me.incarnation

    def _coordinate(self) -> None:
        for _ in range(20):
            if not self._attend():
                return
            job = self.job()
            if job.spec is None or job.end is not None:
                return
            if job.leader is None:
                self._campaign(job)
                return
            if not self._leads(job) or not self.views.sees_all:
                return
            now = time.monotonic()
            self.timers = coordinator.observe(self.timers, job, now)
            decision = coordinator.decide(job, self.timers, now)
            self.publisher.reason(decision.reason)
            self.publisher.overdue(conditions.overdue(job, self.timers, now))
            if decision.txn is None:
                self.slowness.look(job)
                return
            if not self.submit(decision.txn):
                return
            if decision.say:
                self.publisher.event(decision.say, kind_of(decision.txn))

    def _inquire(self) -> None:
        group, job = self.node.group, self.job()
        self.inquest.tend(job, doubt=group is not None and bool(group.doubt), leads=self._leads(job) and self.views.sees_all)

    def _campaign(self, job: Job) -> None:
        """Everybody may; a little dice keeps them from colliding."""
        now = time.monotonic()
        if self._campaign_at == 0.0:
            self._campaign_at = now + random.uniform(0, 0.05)
        if now < self._campaign_at or job.members.get(self.me.host) is None:
            return
        self._campaign_at = 0.0
        if self.submit(transactions.elect(job, self.me, self.node.lease)):
            self.timers = Timers()  # what an earlier term has seen is long over
            self._attend()  # what it decides on comes with the first listing of everything

    def _tell_of_store(self) -> None:
        """After a turn without an error, which may have asked the store for nothing: renewals of the lease tell whether it answers."""
        self.publisher.lag(self.lease.answer_s)
        if self.lease.silent:
            self._said(f"no renewal of its lease for {self.lease.silent_s:.1f} s")
        elif self.lease.renewed_at > self._unanswered_at:
            self._said("")

    def _said(self, text: str) -> None:
        """Store trouble is told once when it begins, and once when it is over."""
        if bool(text) != bool(self._told):
            kind = EventKind.STORE if text else EventKind.STORE_BACK
            self.publisher.event(f"{self.me.host}: {text or 'the store answers again'}", kind)
        self._told = text

    @property
    def _idle(self) -> bool:
        """The job runs a Python script that cannot be rehearsed (yet), and this node has no ranks."""
        job = self.job()
        if job.spec is None or job.spec.no_python:
            return False
        return self.node.group is None and job.map is not None and job.map.slot_of(self.me) is None and not job.movable and job.end is None

    def park(self) -> None:
        """Let the workers stop where they are, from any thread."""
        group = self.node.group
        for pid in group.pids if group is not None else ():
            self.server.send(pid, wire.Park())

    def pass_on(self, number: int) -> None:
        """A signal for the script: for the processes that run it, and for none that only rehearse it."""
        if self.runs_a_slot:
            self.processes.pass_on(number)

    @property
    def runs_a_slot(self) -> bool:
        """True while workers of a slot may be running here."""
        group = self.node.group
        return group is not None and group.purpose is core.Purpose.ACTIVE and not group.gone

    @property
    def proven_at(self) -> float:
        """Every rank of the epoch has lived after this moment (boot clock, seconds), as a step proves that a worker here completed."""
        return self.health.proven_at()
