"""A whole job in one process, on virtual time: agents, their workers and the store, one micro-step at a time.

A simulated agent is the real ``core.node``, ``core.reconcile``, ``core.coordinator`` and views; only the shell around them is rewritten
here, to the rules of ``tmrun_agent.loop`` and ``tmrun_agent.lease``: tend the lease first, execute one effect, read the store anew after
each own transaction, decide on what the views say (each of which may be old), coordinate when elected, campaign when nobody is.
An agent sees what a real one would: what is told to all and what is its own; everything once it coordinates and has heard of it.
One micro-step executes exactly one effect, so that a fault can strike between any two. After each, ``Audit`` checks the invariants.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from audit import Audit
from tmrun_agent.views import Views
from training import Abort, Commit, Prepare, Training, Worker

from tmrun.core import codec, coordinator, node, planner, preemption, reconcile, states, transactions
from tmrun.core.decision import Timers
from tmrun.core.errors import LeaseGone, OutcomeUnknown, StoreError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, fold
from tmrun.core.model import (
    FENCE_SHARE,
    PROOF_SHARE,
    Evidence,
    Host,
    Incarnation,
    Member,
    Obituary,
    Operation,
    OpState,
    Pause,
    Seat,
    Sign,
    Spec,
    Verb,
)
from tmrun.core.node import Purpose
from tmrun.core.txn import Put, Txn
from tmrun.store.memory import Fate, MemoryKeepAlive, MemoryStore, MemoryWorld

TICK_S = 1.0
SPEC = Spec(nnodes=2, nproc=1, standby=1, command=("train.py",), lease_ttl_s=10, join_wait_s=5.0, prepare_deadline_s=40.0, node_wait_s=1e6)


@dataclass
class Agent:
    """One agent process; ``step`` is a micro-step."""

    world: World
    host: Host
    life: int
    store: MemoryStore = field(init=False)
    member: Member = field(init=False)
    node: node.Node = field(init=False)
    views: Views = field(init=False)
    timers: Timers = field(default_factory=Timers)
    alive: bool = True
    frozen: bool = False
    term: bool = False
    """It got SIGTERM."""
    lease_lost: bool = False
    fenced: bool = False
    kept: MemoryKeepAlive = field(init=False)
    unsafe_since: float = float("inf")
    """Last renewal before the registration was lost."""
    said: str = ""
    """Why this coordinator waits."""
    _job: Job | None = None

    def __post_init__(self) -> None:
        self.store = self.world.store.client(f"{self.host}.{self.life}")
        self.member = Member(self.host, Incarnation(f"{self.host}.{self.life}"), f"addr-{self.host}", self.life, "1")
        self.node = node.Node(self.member.seat, 0)
        self._acquire()
        self.views = Views(self.store, self.world.keys, self.host, self._moved)

    @property
    def me(self) -> Seat:
        return self.member.seat

    def _moved(self) -> None:
        self._job = None

    def job(self) -> Job:
        if self._job is None:
            self._job = fold(self.world.keys, self.views.snapshot())
        return self._job

    def _acquire(self) -> None:
        if hasattr(self, "kept"):
            self.kept.close()
            self.unsafe_since = min(self.unsafe_since, self.kept.last_renewed)
        lease = self.store.grant(self.world.spec.lease_ttl_s)
        self.node = node.observe(self.node, node.Leased(lease))
        self.kept = self.store.keep_alive(lease, self.world.spec.lease_ttl_s, self._lost)
        self.lease_lost = False

    def _lost(self) -> None:
        self.lease_lost = True

    def submit(self, txn: Txn) -> bool:
        if self.world.late is not None:
            self.world.late(self, txn)
        before = self.world.store.listing(self.world.keys.ctl)
        succeeded = False
        try:
            way = self.store if self.alive else self.world.store  # a request may arrive after its sender's death
            succeeded = way.commit(txn).succeeded
        except OutcomeUnknown:
            pass
        finally:
            self.world.audit.wrote(self.me, txn, before, self.world.store.listing(self.world.keys.ctl))
        self.refresh()
        return succeeded

    def refresh(self) -> None:
        self.views.refresh()
        self._job = None

    # -- one micro-step
    def step(self) -> str:
        """What it did, empty when it can only wait."""
        if not self.alive or self.frozen:
            return ""
        for fact in self.world.training.facts.pop(self.me, []):
            self.node = node.observe(self.node, fact)
        try:
            return self._tend() or self._leave() or self._act() or self._coordinate() if self._attend() else ""
        except LeaseGone:
            self.lease_lost = True
            return "hears that its lease is gone"
        except StoreError:
            return ""

    def _leave(self) -> str:
        job, group = self.job(), self.node.group
        txn = preemption.answer(job, self.me, "SIGTERM" if self.term else "", preemption.HANDOVER_S, shutdown=self.term)
        if txn is not None:
            return f"{txn.name}{'' if self.submit(txn) else ' FAILS'}"
        if not self.term or not preemption.gone(job, self.me) or (group is not None and group.purpose is Purpose.ACTIVE and not group.gone):
            return ""
        whole, said = self.world.job(), "leaves"
        if whole.end is None and preemption.abandoned(whole):
            self.submit(transactions.end_job(whole, preemption.ABANDONED, as_leader=False))
            said = "leaves as the last one, and stops the job"
        self.world.kill_agent(self.host)
        self.world.store.revoke(self.node.lease)
        return said

    def _attend(self) -> bool:
        """Watch what concerns this agent now; True when it has heard of all that."""
        job = self.job()
        leads = job.leader is not None and job.leader.value.incarnation == self.me.incarnation
        if self.views.want(reconcile.concerns(self.node, job), everything=leads):
            self._job = None
        return self.views.loaded

    @property
    def silent(self) -> bool:
        """No renewal for so long that others may soon believe this agent dead."""
        return self.world.clock.now - min(self.kept.last_renewed, self.unsafe_since) >= self.world.spec.lease_ttl_s * FENCE_SHARE

    def fence(self) -> bool:
        """Park or kill the workers before anybody else may take the slot, unless their progress proves that the others live."""
        if not self.silent:
            self.fenced = False
            return False
        limit = self.world.spec.lease_ttl_s * PROOF_SHARE
        progressing = self.world.clock.now - self.world.training.proven.get(self.me, -1e9) < limit
        group = self.node.group
        if self.fenced or group is None or group.purpose is Purpose.STANDBY or progressing:
            return False
        job = self.job()
        self.world.training.park(self.me)
        if self._parked and job.map is not None and self.me in job.map.seats and not job.draining(self.host):
            return False
        self.fenced = True
        self._kill("fenced")
        return True

    @property
    def _parked(self) -> bool:
        """All its workers wait for a decision, as their beacons show."""
        return all(w.waits for w in self.world.training.of(self.me))

    def _kill(self, reason: str, code: int = 137) -> None:
        for worker in self.world.training.of(self.me):
            self.world.training.end(worker, code)
        self.node = node.observe(self.node, node.Killing(reason))

    def _tend(self) -> str:
        if self.fence():
            return "fences itself: kills its workers"
        if self.lease_lost:
            self._acquire()
            return "takes another lease"
        if not self.job().alive(self.me):
            return "registers" if self.submit(transactions.register(self.job(), self.member, self.node.lease)) else ""
        self.unsafe_since = float("inf")
        return ""

    def _act(self) -> str:
        effect = reconcile.reconcile(self.node, self.job())
        if effect is None or (isinstance(effect, node.Spawn) and self.silent):
            return ""
        if reconcile.unsure(self.node, self.job(), effect):
            effect = reconcile.reconcile(self.node, fold(self.world.keys, self.views.read()))
            if not isinstance(effect, node.Kill):
                self.refresh()
                return ""
        if isinstance(effect, node.Kill):
            self.world.audit.kills(self.node, effect)
        before = self.node, self._job
        text = self._execute(effect)
        return text if (self.node, self._job) != before or not self.alive else ""

    def _execute(self, effect: node.Effect) -> str:  # noqa: C901  one case an effect
        training, group = self.world.training, self.node.group
        match effect:
            case node.Spawn():
                return self._spawn(effect)
            case node.Kill():
                self._kill(effect.reason, 143 if effect.gently else 137)
                return f"kills its workers: {effect.reason}"
            case node.Prepare(migration, slot, _):
                assert group is not None
                for local, pid in enumerate(group.pids):
                    training.send(pid, Prepare(migration, self.world.spec.ranks(slot)[local]))
                self.node = node.observe(self.node, node.Sent(effect))
                return f"prepare {migration.kind.value} {migration.id} -> workers"
            case node.Commit(current, _, _, _):
                assert group is not None
                for pid in group.pids:
                    training.send(pid, Commit(current))
                self.node = node.observe(self.node, node.Sent(effect))
                return f"commit {current.epoch} -> workers"
            case node.Abort(number, reason):
                assert group is not None
                for pid in group.pids:
                    training.send(pid, Abort(number))
                self.node = node.observe(self.node, node.Sent(effect))
                return f"abort {number} -> workers: {reason}"
            case node.Submit(txn, _, then, _):
                return self._submit(txn, then)
            case node.Note(fact, reason):
                self.node = node.observe(self.node, fact)
                return reason
            case node.Quit(code, reason):
                self.world.kill_agent(self.host)
                return f"ends with {code}: {reason}"

    def _spawn(self, effect: node.Spawn) -> str:
        spec, standby = self.world.spec, effect.purpose is Purpose.STANDBY
        if not standby:
            self.world.audit.spawned(self.me, effect)
        pids = tuple(
            self.world.training.spawn(self.me, local, rank, effect.epoch, effect.generation, standby=standby)
            for local, rank in enumerate(spec.ranks(effect.slot))
        )
        self.node = node.observe(self.node, node.Spawned(node.Group(effect.purpose, effect.slot, effect.epoch, effect.generation, pids)))
        return f"starts workers: {effect.reason}"

    def _submit(self, txn: Txn, then: node.Fact | None) -> str:
        done = self.submit(txn)
        if done and then is not None:
            self.node = node.observe(self.node, then)
        return f"{txn.name}{'' if done else ' FAILS'}"

    def _coordinate(self) -> str:
        job = self.job()
        if job.spec is None or job.end is not None:
            return ""
        if job.leader is None:
            if job.members.get(self.host) is None or job.members[self.host].value.incarnation != self.me.incarnation:
                return ""
            won = self.submit(transactions.elect(job, self.me, self.node.lease))
            self.timers = Timers() if won else self.timers
            return "is elected" if won else "loses the election"
        if job.leader.value.incarnation != self.me.incarnation or not self.views.sees_all:
            return ""
        now = self.world.clock.now
        self.timers = coordinator.observe(self.timers, job, now)
        decision = coordinator.decide(job, self.timers, now)
        self.said = decision.reason
        if decision.txn is None:
            return ""
        done = self.submit(decision.txn)
        return f"{decision.txn.name}{'' if done else ' FAILS'}: {decision.reason}"


class World:
    """Hosts, store, workers, clock; faults are methods."""

    def __init__(self, hosts: int = 4, spec: Spec = SPEC, total: int = 10_000, *, replicated: bool = True) -> None:
        self.spec = spec
        self.store = MemoryWorld(auto=False)
        self.clock = self.store.clock
        self.keys = Keys("job")
        self.training = Training(spec, total, replicated)
        self.audit = Audit(self)
        self.agents: dict[str, Agent] = {}
        self.lives: dict[str, int] = {}
        self.told_to_go: set[str] = set()
        self.ops = 0
        self.late: Callable[[Agent, Txn], None] | None = None
        """Called when an agent has decided on a transaction and has not sent it yet."""
        self.operator = self.store.client("operator")
        self.operator.commit(transactions.create_spec(fold(self.keys, ()), spec))
        for i in range(hosts):
            self.add_host(f"node{i}")

    # -- people and machines
    def add_host(self, name: str) -> Agent:
        """A new agent; also a restart of one that is dead."""
        self.lives[name] = self.lives.get(name, 0) + 1
        agent = self.agents[name] = Agent(self, Host(name), self.lives[name])
        return agent

    def kill_agent(self, name: str) -> None:
        """Its workers die with it (parent-death signal); its lease runs out by itself."""
        agent = self.agents[name]
        agent.alive = False
        agent.store.crash()
        for worker in self.training.of(agent.me):
            worker.exit = 137

    def term(self, name: str) -> None:
        """The host gets SIGTERM."""
        self.agents[name].term = True
        self.told_to_go.add(name)

    def hang(self, name: str) -> bool:
        """One process of the host gets stuck; once all others wait for it, every agent notices that its workers make no progress."""
        victims = [w for w in self.training.of(self.agents[name].me) if w.state == "loop"]
        if not victims:
            return False
        victims[0].stuck = True
        for _ in range(3):
            self.round()
        for agent in self.agents.values():
            workers = [w for w in self.training.of(agent.me) if w.seated]
            signs = tuple(Sign(w.rank, "STEP", w.step, int(w.entered), Evidence.LATE, 610.0) for w in workers)
            if agent.alive and signs:
                self.training.facts.setdefault(agent.me, []).append(node.WorkersStall(signs))
        return True

    def bury(self, name: str) -> None:
        """The launcher saw the agent exit: it confirms the death and ends the lease."""
        agent = self.agents[name]
        note = codec.encode(Obituary(agent.host, agent.me.incarnation))
        self.operator.commit(Txn((), (Put(self.keys.obituary(name), note),), "obituary"))
        if agent.kept is not None:
            self.store.revoke(agent.node.lease)

    def kill_worker(self, name: str, code: int = 137) -> bool:
        """One process of the host dies."""
        living = self.training.of(self.agents[name].me)
        if living:
            self.training.end(living[0], code)
        return bool(living)

    def job(self) -> Job:
        """The truth."""
        return fold(self.keys, self.store.listing(self.keys.ctl).entries)

    def drain(self, *hosts: str, to: str = "", verb: Verb = Verb.DRAIN, force_after_s: float = 0.0) -> str:
        """An operator drains (or replaces) hosts; the request's id, empty when refused."""
        self.ops += 1
        op = Operation(f"{verb.value[0]}{self.ops}", verb, tuple(Host(h) for h in hosts), "maintenance", to, force_after_s)
        job = self.job()
        if any(job.draining(Host(h)) for h in hosts):
            return ""
        return op.id if self.operator.commit(transactions.request(job, op)).succeeded else ""

    def undrain(self, *hosts: str, cancel: str = "") -> bool:
        """Take a drain back; ``cancel``: the open request too."""
        job = self.job()
        if not all(Host(h) in job.admins for h in hosts):
            return False
        op = job.ops.get(cancel)
        done = self.operator.commit(transactions.withdraw_drain(job, tuple(Host(h) for h in hosts), op, "cancelled")).succeeded
        self.audit.check()
        return done

    def cordon(self, name: str, *, wanted: bool = True) -> bool:
        """An operator cordons or uncordons a host."""
        job, hosts = self.job(), (Host(name),)
        txn = transactions.cordon(job, hosts, "noisy") if wanted else transactions.uncordon(job, hosts)
        done = self.operator.commit(txn).succeeded
        self.audit.check()
        return done

    def pause(self, *, wanted: bool = True) -> bool:
        """An operator stops automatic replacement, or lets it go on."""
        job = self.job()
        if wanted == (job.pause is not None):
            return False
        txn = transactions.pause(job, Pause("looking into it")) if wanted else transactions.resume(job)
        return self.operator.commit(txn).succeeded

    def take_back(self, name: str) -> str:
        """What ``tmrun drain --cancel`` or ``tmrun undrain`` do for this host, as far as they may."""
        job = self.job()
        admin = job.admins.get(Host(name))
        op = job.ops.get(admin.op) if admin else None
        if op is None:
            return "not drained"
        if op.state is not OpState.OPEN:
            return f"undrain {name}: {self.undrain(name)}"
        if job.map is None or not any(job.map.slot_of_host(h) is not None for h in op.hosts):
            return "already committed"
        return f"cancel {op.id}: {self.undrain(*op.hosts, cancel=op.id)}"

    def lose_answer(self, name: str, *, applied: bool) -> None:
        """The agent's next commit gets no answer."""
        self.agents[name].store.next_commits(Fate.APPLIED_UNANSWERED if applied else Fate.LOST)

    # -- running
    def deliver(self, name: str, limit: int = 1_000_000) -> int:
        """Hand waiting watch events to an agent."""
        count = 0
        agent = self.agents[name]
        for watch in tuple(agent.store._watches):
            while watch.deliverable and count < limit and not agent.frozen:
                watch.deliver()
                count += 1
        return count

    def step_agent(self, name: str) -> str:
        """One effect of one agent."""
        text = self.agents[name].step()
        self.audit.check()
        return text

    def step_worker(self, worker: Worker) -> str:
        """One action of one process."""
        self.training.now = self.clock.now
        agent = self.agents.get(worker.seat.host)
        text = self.training.act(worker)
        assert agent is not None
        self.audit.check()
        return text

    def advance(self, seconds: float) -> None:
        """Let time pass in ticks; an agent that is not frozen looks at its lease in each (fence + kill + margin < TTL)."""
        while seconds > 0:
            tick = min(TICK_S, seconds)
            self.store.advance(tick)
            seconds -= tick
            for agent in self.agents.values():
                if agent.alive:
                    agent.fence()  # a frozen one's workers have a watchdog that does the same
            self.audit.check()

    # -- healing
    def heal(self) -> None:
        """Everything that was broken works again, and there are enough hosts."""
        for agent in self.agents.values():
            agent.frozen = False
            agent.store._fates.clear()
            if agent.alive:
                agent.store.partitioned = False
        for worker in self.training.workers:
            worker.unlucky = worker.stuck = False
        for agent in self.agents.values():
            self.training.facts.setdefault(agent.me, []).append(node.WorkersStall(()))  # they move again
        self.pause(wanted=False)
        for host in self.job().admins:
            self.cordon(host, wanted=False)
        job = self.job()
        faulty = {host for host, member in job.members.items() if member.value.fault}
        for name, agent in list(self.agents.items()):
            if job.end is None and (not agent.alive or agent.term or agent.host in faulty):
                self.kill_agent(name)
                self.add_host(name)
        while sum(not job.draining(Host(n)) for n in self.agents) < self.spec.nnodes + 2:
            self.add_host(f"node{len(self.agents)}")

    def run(self, until: str = "", limit: int = 4000) -> list[str]:
        """Everybody acts in turn; time passes when nobody can. Ends when ``settled`` (or a line matches ``until``)."""
        lines: list[str] = []
        idle = steps = 0
        while steps < limit:
            steps += 1
            moved = False
            for line in self.round():
                moved = moved or not re.search(r"(enters|passes) step", line)
                lines.append(line)
                if until and re.search(until, line):
                    return lines
            if self.settled() and not moved and not until:
                return lines
            idle = 0 if moved else idle + 1
            if idle > 3:
                self.advance(TICK_S)
        where = f"{states.job_state(self.job())}, coordinator: {self.thinks()}"
        raise AssertionError(
            f"invariant 15: no end after {limit} rounds: {where}\n" + "\n".join([*lines[-30:], *map(str, self.training.living())])
        )

    def thinks(self) -> str:
        """What the coordinator waits for."""
        leader = self.job().leader
        agent = self.agents.get(leader.value.host) if leader else None
        return f"{agent.host}: {agent.said}" if agent else "nobody"

    def round(self) -> list[str]:
        """One micro-step each."""
        lines = []
        for name in sorted(self.agents):
            self.deliver(name)
            text = self.step_agent(name)
            if text:
                lines.append(f"{name}: {text}")
        for worker in self.training.living():
            text = self.step_worker(worker)
            if text:
                lines.append(f"  {worker.seat.host} rank {worker.rank} {text}")
        return lines

    def settled(self) -> bool:
        """The job has ended, or trains in the newest epoch with nothing left to do."""
        job = self.job()
        if job.end is not None:
            return not any(w.lives for w in self.training.workers)
        if job.map is None or job.open_migration or not job.leader or not all(job.alive(s) for s in job.map.seats):
            return False
        if states.job_state(job)[0].value != "running":
            return False
        last = self.training.completed[-3:]
        if len(last) < 3 or any(c[1] != job.epoch for c in last):
            return False
        if any(op.verb is Verb.DRAIN for op in job.open_ops()) and self.thinks_of_drain(job):
            return False
        held = all(i in job.runs and job.runs[i].value.epoch == job.epoch and job.runs[i].value.joined for i in range(self.spec.nnodes))
        return held and {(job.map.generation, job.epoch)} == self.training.able_epochs()

    def thinks_of_drain(self, job: Job) -> bool:
        """An open drain can go on: somebody is free to take the ranks, or only the end has to be told."""
        assert job.map is not None
        seated = any(job.map.slot_of_host(h) is not None for op in job.open_ops() for h in op.hosts)
        return not seated or bool(planner.standbys(job, warm_only=False))
