"""tmrun itself on a trace: the hosts do what agents do, the production coordinator decides (``world``), time is booked (``ledger``).

    agenda      what is going to happen           progress    how far the training is
    scene       the state of everything           hosts       faults, leases, arrivals, drains
    voting      answers to an open migration      epochs      what follows from a committed map

Discrete events only: faults, what somebody learns of them, votes, arrivals, the core's own time limits. Between two of them the job trains
or waits, and time passes in closed form. May not know: other strategies, files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tmrun.core import planner
from tmrun.core.membership import Job
from tmrun.sim.costs import Costs
from tmrun.sim.epochs import Epochs
from tmrun.sim.hosts import Hosts
from tmrun.sim.ledger import Outcome, Term, outcome
from tmrun.sim.progress import Progress
from tmrun.sim.scene import Options, Scene, State
from tmrun.sim.shape import Shape
from tmrun.sim.trace import EXPECTED, Event, Fault
from tmrun.sim.voting import Voting

MAX_STORY = 2_000
DAY_S = 86_400.0
_NEVER = float("inf")


class Mover:
    """One run."""

    def __init__(
        self, shape: Shape, costs: Costs, options: Options, trace: Sequence[Event], name: str = "tmrun", label: str = "tmrun"
    ) -> None:
        self.trace, self.name, self.label = trace, name, label
        snapshots = options.snapshots and shape.replicas == 1  # kept only where some shard has no replica, as the workers do
        self.scene = Scene(shape, costs, options, Progress(costs, _checkpoint_interval(shape, costs, options, trace), snapshots))
        self.hosts = Hosts(self.scene, self.coordinate, shape.seed)
        self.voting = Voting(self.scene, self.coordinate)
        self.epochs = Epochs(self.scene, self.hosts, self.coordinate, self._launch)
        self.story: deque[tuple[float, str]] = deque(maxlen=MAX_STORY)
        """Faults and what the coordinator said, and when."""
        self._wake_at = _NEVER
        self._seen_open = self._seen_epoch = 0

    def play(self, on_day: Callable[[int], None] = lambda _: None) -> Outcome:
        """Simulate to the horizon; ``on_day`` is told which day it is, at each fault."""
        self._launch()
        scene, agenda = self.scene, self.scene.agenda
        end = scene.shape.horizon_s
        coming = iter([*(e for e in self.trace if e.time_s < end), None])
        fault = next(coming)
        while True:
            due = min(agenda.due, end)
            if fault is not None and fault.time_s <= due:
                self._pass_to(fault.time_s)
                on_day(int(fault.time_s / DAY_S))
                self.story.append((fault.time_s, f"fault: {fault.text}"))
                self.hosts.strike(fault)
                fault = next(coming)
            elif due < end:
                action = agenda.next()
                self._pass_to(due)
                action()
            else:
                break
        self._pass_to(end)
        gpus, spare = scene.shape.gpus, scene.options.standby * scene.shape.nproc
        source = "simulated on tmrun's own coordinator"
        return outcome(self.name, self.label, source, gpus, spare, end, scene.progress.ledger, dict(scene.counts), tuple(self.story))

    def _pass_to(self, when: float) -> None:
        self.scene.agenda.now = when
        self.scene.progress.pass_to(when)

    def _launch(self) -> None:
        self.scene.launch()
        self._seen_open, self._seen_epoch = 0, self.scene.world.job().epoch

    # -- the coordinator's turn
    def coordinate(self) -> None:
        """Let the elected agent decide until it has nothing to do; a dead one decides nothing until its lease has run out."""
        scene, world = self.scene, self.scene.world
        dead = world.leader >= 0 and scene.machines[world.leader].state is State.DEAD
        if dead or world.job().end is not None:
            self._classify()
            return
        while (decision := world.decide(scene.agenda.now, self._electable)).txn is not None:
            if decision.say:
                self.story.append((scene.agenda.now, decision.say))
            self._follow(world.job())
            if world.job().end is not None:
                break
        self._classify()
        self._wake()

    def _electable(self, m: int) -> bool:
        return self.scene.machines[m].state in (State.READY, State.SICK)

    def _follow(self, job: Job) -> None:
        if job.end is not None:
            self.epochs.end()
            return
        self.epochs.finish_drains(job)
        opened = job.open_migration
        if opened is not None and opened.id != self._seen_open:
            self._seen_open = opened.id
            self.scene.counts["proposals"] += 1
            self.scene.progress.alarm = self.hosts.blamed_on_an_alarm(opened.op)
            self.voting.open(opened)
        if job.map is not None and job.epoch != self._seen_epoch:
            self._seen_epoch = job.epoch
            self.epochs.begin(job.map)

    def _classify(self) -> None:
        """What the stopped job waits for."""
        scene, progress = self.scene, self.scene.progress
        if progress.stopped in (None, Term.RESTART) or scene.switching or scene.restarting:
            return
        job, known = scene.world.job(), scene.told & scene.broken
        if job.open_migration is not None:
            progress.stopped = Term.SWITCH if scene.world.missing() else Term.DECIDE
        elif not known:
            progress.stopped = Term.DETECT
        else:
            progress.stopped = Term.REFILL if len(planner.standbys(job)) < len(known) else Term.DECIDE

    def _wake(self) -> None:
        """Ask again when the next of the core's own time limits passes."""
        scene, now = self.scene, self.scene.agenda.now
        if scene.switching or (scene.progress.stopped is None and scene.world.job().open_migration is None):
            return
        due = scene.world.wakes(now)
        if due < scene.shape.horizon_s and not (now < self._wake_at <= due):
            self._wake_at = due
            scene.agenda.after(due - now, self._woken)

    def _woken(self) -> None:
        if self.scene.agenda.now >= self._wake_at - 1e-6:
            self.coordinate()


def _checkpoint_interval(shape: Shape, costs: Costs, options: Options, trace: Sequence[Event]) -> float:
    """Young/Daly on what restarts everybody: the program's errors, and every loss that nothing in memory covers."""
    bare = shape.replicas == 1 and not options.snapshots
    feared = sum(e.kind is Fault.SOFTWARE or (e.kind not in EXPECTED and (bare or len(e.hosts) > planner.MAX_MOVES)) for e in trace)
    return costs.checkpoint.interval_s(feared, shape.horizon_s)
