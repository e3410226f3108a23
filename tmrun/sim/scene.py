"""The state of a simulated job: its machines as they are and not as others believe, who holds which slot, what it waits for.

Changed by ``hosts`` (what happens to machines), ``voting`` and ``epochs`` (what follows from the coordinator's decisions). May not know:
why anything is changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from tmrun.core.model import Spec
from tmrun.sim.agenda import Agenda
from tmrun.sim.costs import Costs
from tmrun.sim.ledger import Term
from tmrun.sim.progress import Progress
from tmrun.sim.shape import Shape
from tmrun.sim.trace import Fault
from tmrun.sim.world import JobWorld

RESTARTS = 1_000_000
"""``--max-restarts`` of the simulated job: the program's errors must not end it, their restarts are what is counted."""


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
class Scene:
    """Positions 0..hosts-1 hold machines; position p is held by machine p or, while they are exchanged, by p + hosts."""

    shape: Shape
    costs: Costs
    options: Options
    progress: Progress
    agenda: Agenda = field(default_factory=Agenda)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.hosts = self.shape.nodes + self.options.standby
        self.machines = {m: Machine() for m in range(2 * self.hosts)}
        self.at_position = list(range(self.hosts))
        self.slots: dict[int, int] = {}
        """Machine -> the slot that it holds."""
        self.broken: set[int] = set()
        """Slots whose seat has no working processes."""
        self.told: set[int] = set()
        """Of those, the slots whose fault the store knows."""
        self.halted_at = 0.0
        """When the last step was entered by everybody."""
        self.switching = 0
        """Committed migrations whose joiners do not have their state yet."""
        self.restarting = False
        self.copied_at: dict[int, int] = {}
        """Slot -> the first step whose snapshot its present seat can hold of its neighbour."""

    def launch(self) -> None:
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
        fresh = self.agenda.launch == 0
        self.agenda.launch += 1
        self.world = JobWorld(spec, self.agenda.now)
        here = [m for m in self.at_position if fresh or self.ready(m)]
        for machine in self.machines.values():
            machine.state = State.OUT
        for m in here:
            self.machines[m] = Machine(State.READY, self.machines[m].life + 1)
        self.world.launch({m: self.labels(m) for m in here}, self.agenda.now)
        self.broken, self.told, self.copied_at = set(), set(), {}
        self.switching, self.restarting = 0, False
        self.progress.slow, self.progress.stopped, self.progress.alarm = set(), None, False
        self.reseat()

    def labels(self, machine: int) -> dict[str, str]:
        """What its agent says of its place."""
        if not self.options.placement:
            return {}
        return {"rack": f"rack{machine % self.hosts // self.shape.rack_nodes}"}

    def ready(self, machine: int) -> bool:
        """Its agent runs, and its workers do."""
        return self.machines[machine].state is State.READY

    def reseat(self) -> None:
        """The newest map says who holds which slot."""
        self.slots = self.world.seats()

    def halt(self, slot: int) -> None:
        """The workers of a slot stand still, and so does everybody."""
        self.broken.add(slot)
        if self.progress.stopped is None or self.switching:
            self.progress.stopped, self.halted_at = Term.DETECT, self.agenda.now

    def go_on(self) -> None:
        """Train, if nothing stands in the way."""
        if self.broken:
            self.progress.stopped = Term.DETECT
        elif not self.switching and not self.restarting:
            self.progress.stopped, self.progress.alarm = None, False
