"""tmrun itself on a trace: the hosts do what agents do, the production coordinator decides (``world``), time is booked (``ledger``).

Discrete events only: faults, what somebody learns of them, votes, arrivals, the core's own time limits. Between two of them the job trains
or waits, and time passes in closed form. May not know: other strategies, files.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from tmrun.core import planner
from tmrun.core.membership import Job, Stored
from tmrun.core.model import Host, Kind, Migration, OpState, RankMap, Spec, Vote, WorkerVote
from tmrun.sim.costs import Costs
from tmrun.sim.ledger import Ledger, Outcome, Term, outcome
from tmrun.sim.parked import Parked
from tmrun.sim.shape import Shape
from tmrun.sim.trace import EXPECTED, Event, Fault
from tmrun.sim.world import JobWorld

RESTARTS = 1_000_000
"""``--max-restarts`` of the simulated job: the program's errors must not end it, their restarts are what is counted."""
RETELL_S = 1.0
RETRY_S = 60.0
"""How often a launch is tried again while hosts are missing."""
JOINER_LOST = Event(0.0, (), Fault.EXIT, "failed before it took its ranks over")
STILL_SICK = Event(0.0, (), Fault.EXIT, "failed again after the restart")
MAX_STORY = 2_000


class State(Enum):
    """A machine, as it is and not as others believe."""

    READY = "its agent runs; its workers train or are (or get) warm"
    SICK = "its agent runs, its workers do not"
    DEAD = "gone, and its lease still lives"
    OUT = "not in the job"


@dataclass(frozen=True, slots=True)
class Options:
    """How tmrun is used."""

    standby: int = 1
    snapshots: bool = True
    placement: bool = True


@dataclass(slots=True)
class Machine:
    """One machine. ``life`` numbers its registrations; ``leaving``: the request that drains it."""

    state: State = State.OUT
    life: int = 0
    leaving: str = ""
    blame: Fault | None = None


@dataclass
class Mover:
    """One run. Positions 0..hosts-1 hold machines; position p is held by machine p or, while they are exchanged, by p + hosts."""

    shape: Shape
    costs: Costs
    options: Options
    trace: Sequence[Event]
    name: str = "tmrun"
    label: str = "tmrun"

    now: float = 0.0
    done_s: float = 0.0
    """Useful work so far, in seconds of undisturbed training."""
    ledger: Ledger = field(default_factory=Ledger)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.hosts = self.shape.nodes + self.options.standby
        self.machines = {m: Machine() for m in range(2 * self.hosts)}
        self.at_position = list(range(self.hosts))
        self.story: deque[tuple[float, str]] = deque(maxlen=MAX_STORY)
        """What the coordinator said, and when."""
        self.rng = random.Random(f"{self.shape.seed}/lease")
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.pushed = 0
        self.slots: dict[int, int] = {}
        self.broken: set[int] = set()
        """Slots whose seat has no working processes."""
        self.told: set[int] = set()
        """Of those, the slots whose fault the store knows."""
        self.slow: set[int] = set()
        self.stopped: Term | None = None
        self.halted_at = 0.0
        """When the last step was entered by everybody."""
        self.switching = 0
        """Committed migrations whose joiners do not have their state yet."""
        self.restarting = False
        self.alarm = False
        """The open or just committed migration replaces a healthy host."""
        self.since = 0.0
        self.wake_at = float("inf")
        self.seen_open = self.seen_epoch = self.ops = self.launches = 0
        self.copied_at: dict[int, int] = {}
        """Slot -> the first step whose snapshot its present seat can hold of its neighbour."""
        self.yes: dict[tuple[int, int], Stored[Vote]] = {}
        self.every_s = self._checkpoint_interval()

    @property
    def snapshots(self) -> bool:
        """Kept only where some shard has no replica, as the workers do."""
        return self.options.snapshots and self.shape.replicas == 1

    def _checkpoint_interval(self) -> float:
        """Young/Daly on what restarts everybody: the program's errors, and every loss that nothing in memory covers."""
        bare = self.shape.replicas == 1 and not self.options.snapshots
        feared = sum(
            e.kind is Fault.SOFTWARE or (e.kind not in EXPECTED and (bare or len(e.hosts) > planner.MAX_MOVES)) for e in self.trace
        )
        return self.costs.checkpoint.interval_s(feared, self.shape.horizon_s)

    # -- the run
    def play(self) -> Outcome:
        """Simulate to the horizon."""
        self._launch()
        end = self.shape.horizon_s
        coming = [e for e in self.trace if e.time_s < end]
        heads = iter([*coming, None])
        fault = next(heads)
        while True:
            due = self.queue[0][0] if self.queue else end
            if fault is not None and fault.time_s <= due:
                self._pass_to(fault.time_s)
                self._strike(fault)
                fault = next(heads)
            elif due < end:
                _, _, action = heapq.heappop(self.queue)
                self._pass_to(due)
                action()
            else:
                break
        self._pass_to(end)
        gpus, spare = self.shape.gpus, self.options.standby * self.shape.nproc
        source = "simulated on tmrun's own coordinator"
        return outcome(self.name, self.label, source, gpus, spare, end, self.ledger, dict(self.counts), tuple(self.story))

    def _at(self, delay_s: float, action: Callable[[], None], *, tied: bool = True) -> None:
        """``tied``: it concerns this launch of the job only."""
        launch = self.launches

        def run() -> None:
            if not tied or launch == self.launches:
                action()

        self.pushed += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.pushed, run))

    def _launch(self) -> None:
        """Start the job (again) on the machines that are there."""
        spec = Spec(
            self.shape.nodes,
            self.shape.nproc,
            self.options.standby,
            ("train.py",),
            RESTARTS,
            self.costs.detect.lease_ttl_s,
            join_wait_s=0.0,
        )
        self.launches += 1
        self.world = JobWorld(spec, self.now)
        fresh = self.launches == 1
        here = [m for m in self.at_position if fresh or self.machines[m].state is State.READY]
        for machine in self.machines.values():
            machine.state = State.OUT
        for m in here:
            self.machines[m] = Machine(State.READY, self.machines[m].life + 1)
        self.world.launch({m: self._labels(m) for m in here}, self.now)
        self.broken, self.told, self.slow, self.copied_at = set(), set(), set(), {}
        self.stopped, self.switching, self.restarting, self.alarm = None, 0, False, False
        self.seen_open, self.seen_epoch = 0, self.world.job().epoch
        self._seat()

    def _labels(self, machine: int) -> dict[str, str]:
        if not self.options.placement:
            return {}
        return {"rack": f"rack{machine % self.hosts // self.shape.rack_nodes}"}

    def _seat(self) -> None:
        self.slots = self.world.seats()

    # -- time
    def _pass_to(self, when: float) -> None:
        start, self.now = self.since, when
        self.since = when
        seconds = when - start
        if seconds <= 0:
            return
        if self.stopped is not None:
            self.ledger.book(Term.ALARM if self.alarm else self.stopped, start, when)
            return
        checkpoint = self.costs.checkpoint.write_s / self.every_s
        per_step = self.costs.snapshot.write_s / (self.costs.snapshot.every_steps * self.costs.step_s) if self.snapshots else 0.0
        slow = self.costs.slowdown if self.slow else 0.0
        useful = seconds / (1 + checkpoint + per_step + slow)
        self.ledger.work(useful, checkpoint=useful * checkpoint, snapshot=useful * per_step, degraded=useful * slow)
        self.done_s += useful

    @property
    def step(self) -> int:
        """The step that runs now."""
        return int(self.done_s / self.costs.step_s + 1e-9)

    def _back_to(self, seconds: float) -> None:
        """Go on from an earlier point."""
        self.ledger.lose(self.done_s - seconds)
        self.done_s = seconds

    # -- faults
    def _strike(self, event: Event) -> None:
        self.counts["faults"] += 1
        for position in event.hosts:
            if position < self.hosts:
                machine = self.at_position[position]
                leaving = self.machines[machine].leaving and event.kind in EXPECTED
                if self.machines[machine].state is State.READY and not leaving:
                    self._hit(machine, position, event)

    def _hit(self, m: int, position: int, event: Event) -> None:
        machine, seated = self.machines[m], m in self.slots
        if event.kind is Fault.SOFTWARE:
            if seated:
                self._stop(self.slots[m])
                self._at(self.costs.detect.exit_s, lambda: self._tell(m, machine.life, event))
        elif event.kind is Fault.SLOW and seated:
            self.slow.add(m)
            self._at(self.costs.detect.slow_s, lambda: self._drain(m, position, event))
        elif event.kind in EXPECTED:
            self._drain(m, position, event)
        else:
            self._lose(m, machine, position, event, seated=seated)

    def _lose(self, m: int, machine: Machine, position: int, event: Event, *, seated: bool) -> None:
        self.counts["nodes lost" if seated else "standbys lost"] += 1
        if seated:
            self._stop(self.slots[m])
        if event.kind is Fault.VANISH:
            machine.state = State.DEAD
            # renewed every TTL/5: it runs out between 0.8 TTL and TTL after the death
            known = self.costs.detect.lease_ttl_s * (0.8 + 0.2 * self.rng.random())
            self._at(known, lambda: self._expire(m, machine.life))
        else:
            machine.state = State.SICK
            known = self.costs.detect.exit_s if event.kind is Fault.EXIT or not seated else self.costs.detect.hang_s
            if not seated:
                self.world.set_warm(m, warm=False)
            else:
                self._at(known, lambda: self._tell(m, machine.life, event))
        if not machine.leaving:  # else its successor is on its way
            self._at(max(event.back_s, known + 1.0), lambda: self._arrive(m, position), tied=False)

    def _stop(self, slot: int) -> None:
        self.broken.add(slot)
        if self.stopped is None or self.switching:
            self.stopped, self.halted_at = Term.DETECT, self.now

    def _tell(self, m: int, life: int, event: Event) -> None:
        machine = self.machines[m]
        if machine.life != life or m not in self.slots or machine.state is State.DEAD or not self.world.registered(m):
            return
        slot = self.slots[m]
        software = event.kind is Fault.SOFTWARE
        if not self.world.trouble(slot, m, event.cause or event.kind.value, code=1 if software else 137, software=software):
            self._at(RETELL_S, lambda: self._tell(m, life, event))  # the leaver of a drain still holds the slot
            return
        self.told.add(slot)
        self._coordinate()

    def _expire(self, m: int, life: int) -> None:
        if self.machines[m].life == life and self.world.registered(m):
            self._leave(m)
            self._coordinate()

    def _leave(self, m: int) -> None:
        if self.world.registered(m):
            self.world.leave(m)
        if m in self.slots:
            slot = self.slots.pop(m)
            self.broken.add(slot)
            self.told.add(slot)
        self.machines[m].state = State.OUT

    def _arrive(self, m: int, position: int) -> None:
        """A machine is at the position again: its agent registers, then it gets warm."""
        there = self.machines[self.at_position[position]]
        if self.at_position[position] != m and there.state is State.READY and not there.leaving:
            return
        if self.world.registered(m):
            self._leave(m)
        machine = self.machines[m] = Machine(State.READY, self.machines[m].life + 1)
        self.at_position[position] = m
        if self.world.job().end is not None:
            return
        self.world.undrain(m)
        self.world.register(m, warm=False, labels=self._labels(m))
        self._at(self.costs.standby.warm_s, lambda: self._warmed(m, machine.life))
        self._care()

    def _warmed(self, m: int, life: int) -> None:
        machine = self.machines[m]
        if machine.life == life and machine.state is State.READY and m not in self.slots:
            self.world.set_warm(m, warm=True)
            self._care()

    def _drain(self, m: int, position: int, event: Event) -> None:
        """The host is asked for; another machine comes to its position after ``back_s``, if need be before this one has left."""
        machine = self.machines[m]
        if machine.state is not State.READY or machine.leaving:
            return
        self.ops += 1
        op = f"d{self.ops:07d}"
        if not self.world.drain(m, op, event.cause or event.kind.value):
            return
        machine.leaving, machine.blame = op, event.kind
        self._at(event.back_s, lambda: self._succeed((m + self.hosts) % (2 * self.hosts), position), tied=False)
        self._coordinate()

    def _succeed(self, m: int, position: int) -> None:
        if self.machines[m].state is State.OUT:
            self._arrive(m, position)
        else:  # the last exchange of this position is still going on
            self._at(RETRY_S, lambda: self._succeed(m, position), tied=False)

    # -- votes
    def _votes(self, migration: Migration) -> None:
        move, failure = self.costs.move, migration.kind is Kind.FAILURE
        self._at(move.prepare_s, lambda: self._stayers_vote(migration.id, failure))
        self._at(max(move.prepare_s, move.bind_s) + 1e-3, lambda: self._movers_vote(migration.id))

    def _stayers_vote(self, number: int, failure: bool) -> None:
        migration = self.world.job().open_migration
        if migration is None or migration.id != number:
            return
        told = self._workers(migration) if failure else {}
        votes: dict[Host, Stored[Vote]] = {}
        moved = migration.slots
        for m, slot in self.slots.items():
            if slot not in moved and self.machines[m].state is State.READY and slot not in self.broken:
                votes[self.world.host(m)] = self._vote(m, told.get(slot, ()))
        self.world.crowd(votes, number)
        self._coordinate()

    def _vote(self, m: int, workers: tuple[WorkerVote, ...]) -> Stored[Vote]:
        key = (m, self.machines[m].life)
        plain = self.yes.get(key)
        if plain is None or workers:
            seat = self.world.seat(m)
            vote = Stored(Vote(seat.host, seat.incarnation, 0, True, workers=workers), "", 0, 0)
            if workers:
                return vote
            plain = self.yes[key] = vote
        return plain

    def _workers(self, migration: Migration) -> dict[int, tuple[WorkerVote, ...]]:
        """Slot -> what its parked workers say, of those whom it concerns."""
        slots, every = migration.slots, self.costs.snapshot.every_steps
        living = [s for m, s in self.slots.items() if self.machines[m].state is State.READY and s not in slots and s not in self.broken]
        newest = self.step - self.step % every if self.snapshots else None
        return Parked(self.shape, self.step, newest, self.copied_at, self.now - self.halted_at).votes(slots, living)

    def _movers_vote(self, number: int) -> None:
        migration = self.world.job().open_migration
        if migration is None or migration.id != number:
            return
        for move in migration.moves:
            joiner, leaver = self.world.number(move.joiner.host), self.world.number(move.leaver.host)
            if self.machines[joiner].state is State.READY:
                self.world.vote(joiner)
            if migration.kind is Kind.DRAIN and self.machines[leaver].state is State.READY and move.slot not in self.broken:
                self.world.vote(leaver, stop_step=self.step + 1)
        self._coordinate()

    # -- the coordinator's decisions, and what follows from them
    def _coordinate(self) -> None:
        """Let the elected agent decide until it has nothing to do; a dead one decides nothing until its lease has run out."""
        leader = self.world.leader
        if self.world.job().end is not None:
            self._classify()
            return
        if leader >= 0 and self.machines[leader].state is State.DEAD:
            self._classify()
            return
        while (decision := self.world.decide(self.now, self._electable)).txn is not None:
            if decision.say:
                self.story.append((self.now, decision.say))
            self._follow(self.world.job())
            if self.world.job().end is not None:
                break
        self._classify()
        self._wake()

    def _care(self) -> None:
        """Ask the coordinator, unless everything is steady: then a host more or less in the pool changes nothing."""
        if self.stopped is not None or self.world.job().open_ops() or self.world.job().leader is None:
            self._coordinate()

    def _electable(self, m: int) -> bool:
        return self.machines[m].state in (State.READY, State.SICK)

    def _follow(self, job: Job) -> None:
        if job.end is not None:
            self._ended(job)
            return
        self._finish_drains(job)
        opened = job.open_migration
        if opened is not None and opened.id != self.seen_open:
            self.seen_open = opened.id
            self.counts["proposals"] += 1
            op = next((m for m in self.machines.values() if m.leaving and m.leaving == opened.op), None)
            self.alarm = op is not None and op.blame is Fault.ALARM
            self._votes(opened)
        if job.map is not None and job.epoch != self.seen_epoch:
            self.seen_epoch = job.epoch
            (self._restart if job.map.kind is Kind.RESTART else self._switch)(job.map)

    def _switch(self, current: RankMap) -> None:
        """A migration is committed."""
        self.counts[f"{current.kind.value} migrations"] += 1
        self.counts["moves"] += len(current.moves)
        before = dict(self.slots)
        self._seat()
        self.slow -= {m for m in before if m not in self.slots}
        if current.kind is Kind.FAILURE:
            self._back_to(min(self.done_s, current.resume.target * self.costs.step_s))
            self.counts["rollbacks"] += current.resume.rollback
        for move in current.moves:
            joiner = self.world.number(move.joiner.host)
            self.broken.discard(move.slot)
            self.told.discard(move.slot)
            self.world.set_warm(joiner, warm=False)
            if current.kind is Kind.FAILURE:
                self.world.claim(move.slot, joiner, joined=False)
            if self.machines[joiner].state is not State.READY:
                self.broken.add(move.slot)
                self._at(0.0, partial(self._tell, joiner, self.machines[joiner].life, JOINER_LOST))
        self.switching, self.stopped = self.switching + 1, Term.SWITCH
        self._at(self.costs.expected_s, lambda: self._resumed(current))

    def _resumed(self, current: RankMap) -> None:
        """The joiners have their state."""
        newest = self.world.job().map
        if newest is None or newest.generation != current.generation:
            return
        self.switching -= 1
        every = self.costs.snapshot.every_steps
        for move in current.moves:
            joiner = self.world.number(move.joiner.host)
            if newest.seats[move.slot] != move.joiner:
                continue
            if current.kind is Kind.DRAIN:
                self.world.release(move.slot)
            if self.machines[joiner].state is State.READY and move.slot not in self.broken:
                self.world.claim(move.slot, joiner, joined=True)
                self.copied_at[move.slot] = (self.step // every + 1) * every
        self._go_on()
        self._care()

    def _finish_drains(self, job: Job) -> None:
        for op in job.ops.values():
            m = self.world.number(op.hosts[0])
            machine = self.machines[m]
            if machine.leaving == op.id and op.state is not OpState.OPEN:
                machine.leaving = ""
                if op.state is OpState.DONE and m not in self.slots:
                    self._leave(m)
                    self.world.undrain(m)
                self.world.forget_op(op.id)

    def _go_on(self) -> None:
        if self.broken:
            self.stopped = Term.DETECT
        elif not self.switching and not self.restarting:
            self.stopped, self.alarm = None, False

    def _restart(self, current: RankMap) -> None:
        """All workers end and start again from the last checkpoint."""
        self.counts["restarts"] += 1
        self._back_to(int(self.done_s / self.every_s + 1e-9) * self.every_s)
        self.world.stop_workers()
        self._seat()
        self.broken, self.told, self.copied_at, self.switching, self.alarm = set(), set(), {}, 0, False
        working = {s for m, s in self.slots.items() if self.machines[m].state is State.READY}
        self.broken = set(range(self.shape.nodes)) - working
        self.slow &= set(self.slots)
        self.restarting, self.stopped = True, Term.RESTART
        self._at(self.costs.framework_s(self.shape.gpus), lambda: self._restarted(current.epoch))

    def _restarted(self, epoch: int) -> None:
        if self.world.job().epoch != epoch:
            return
        self.restarting = False
        for m in self.slots:
            if self.machines[m].state is State.READY:
                self.world.set_warm(m, warm=False)
        self.world.start_workers()
        for m, slot in self.slots.items():
            if self.machines[m].state is State.SICK:  # a restart does not heal: its workers die as soon as they train
                self.broken.add(slot)
                self._at(self.costs.detect.exit_s, partial(self._tell, m, self.machines[m].life, STILL_SICK))
        self._go_on()
        self._coordinate()

    def _ended(self, job: Job) -> None:
        """The core gave the job up: somebody launches it again."""
        self.counts["jobs ended"] += 1
        self._back_to(int(self.done_s / self.every_s + 1e-9) * self.every_s)
        self.stopped, self.alarm = Term.RESTART, False
        r = self.costs.restart
        self._at(r.cleanup_s + r.reschedule_s + self.costs.framework_s(self.shape.gpus), self._relaunch, tied=False)

    def _relaunch(self) -> None:
        if sum(self.machines[m].state is State.READY for m in self.at_position) >= self.shape.nodes:
            self._launch()
        else:
            self._at(RETRY_S, self._relaunch, tied=False)

    def _classify(self) -> None:
        """What the stopped job waits for."""
        if self.stopped is None or self.switching or self.restarting or self.stopped is Term.RESTART:
            return
        job = self.world.job()
        if job.open_migration is not None:
            self.stopped = Term.SWITCH if self.world.missing() else Term.DECIDE
        elif not self.told & self.broken:
            self.stopped = Term.DETECT
        elif len(planner.standbys(job)) < len(self.told & self.broken):
            self.stopped = Term.REFILL
        else:
            self.stopped = Term.DECIDE

    def _wake(self) -> None:
        if self.switching or (self.stopped is None and self.world.job().open_migration is None):
            return
        due = self.world.wakes(self.now)
        if due < self.shape.horizon_s and not (self.now < self.wake_at <= due):
            self.wake_at = due
            self._at(due - self.now, lambda: self._coordinate() if self.now >= self.wake_at - 1e-6 else None)
