"""What happens to hosts, and who learns of it when: faults, leases that run out, machines that come back, drains.

May not know: what the coordinator decides, what a move costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tmrun.sim.scene import Machine, Scene, State
from tmrun.sim.trace import EXPECTED, Event, Fault

RETELL_S = 1.0
RETRY_S = 60.0
"""How often the exchange of a machine is tried again while the last one is going on."""


@dataclass
class Hosts:
    """``ask``: the coordinator should look; ``seed`` of the moments at which leases were renewed last."""

    scene: Scene
    ask: Callable[[], None]
    seed: int

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed}/lease")
        self._requests = 0

    # -- faults
    def strike(self, event: Event) -> None:
        """A fault of the trace."""
        scene = self.scene
        scene.counts["faults"] += 1
        for position in event.hosts:
            if position < scene.hosts:
                m = scene.at_position[position]
                leaving = scene.machines[m].leaving and event.kind in EXPECTED
                if scene.ready(m) and not leaving:
                    self._hit(m, position, event)

    def _hit(self, m: int, position: int, event: Event) -> None:
        scene, life, seated = self.scene, self.scene.machines[m].life, m in self.scene.slots
        if event.kind is Fault.SOFTWARE:
            if seated:
                scene.halt(scene.slots[m])
                scene.agenda.after(scene.costs.detect.exit_s, lambda: self.tell(m, life, event))
        elif event.kind is Fault.SLOW and seated:
            scene.progress.slow.add(m)
            scene.agenda.after(scene.costs.detect.slow_s, lambda: self._drain(m, position, event))
        elif event.kind in EXPECTED:
            self._drain(m, position, event)
        else:
            self._lose(m, position, event, seated=seated)

    def _lose(self, m: int, position: int, event: Event, *, seated: bool) -> None:
        scene, machine, detect = self.scene, self.scene.machines[m], self.scene.costs.detect
        scene.counts["nodes lost" if seated else "standbys lost"] += 1
        if seated:
            scene.halt(scene.slots[m])
        if event.kind is Fault.VANISH:
            machine.state = State.DEAD
            # renewed every TTL/5: it runs out between 0.8 TTL and TTL after the death
            known = detect.lease_ttl_s * (0.8 + 0.2 * self._rng.random())
            scene.agenda.after(known, lambda: self._expire(m, machine.life))
        else:
            machine.state = State.SICK
            known = detect.exit_s if event.kind is Fault.EXIT or not seated else detect.hang_s
            if seated:
                scene.agenda.after(known, lambda: self.tell(m, machine.life, event))
            else:
                scene.world.set_warm(m, warm=False)
        if not machine.leaving:  # else its successor is on its way
            scene.agenda.after(max(event.back_s, known + 1.0), lambda: self._arrive(m, position), tied=False)

    def tell(self, m: int, life: int, event: Event) -> None:
        """Its agent says that the workers have ended."""
        scene = self.scene
        machine = scene.machines[m]
        if machine.life != life or m not in scene.slots or machine.state is State.DEAD or not scene.world.registered(m):
            return
        slot = scene.slots[m]
        software = event.kind is Fault.SOFTWARE
        if not scene.world.trouble(slot, m, event.cause or event.kind.value, code=1 if software else 137, software=software):
            scene.agenda.after(RETELL_S, lambda: self.tell(m, life, event))  # the leaver of a drain still holds the slot
            return
        scene.told.add(slot)
        self.ask()

    def _expire(self, m: int, life: int) -> None:
        if self.scene.machines[m].life == life and self.scene.world.registered(m):
            self.leave(m)
            self.ask()

    def leave(self, m: int) -> None:
        """Its lease is over, and it is out of the job."""
        scene = self.scene
        if scene.world.registered(m):
            scene.world.leave(m)
        if m in scene.slots:
            slot = scene.slots.pop(m)
            scene.broken.add(slot)
            scene.told.add(slot)
        scene.machines[m].state = State.OUT

    # -- machines that come
    def _arrive(self, m: int, position: int) -> None:
        """A machine is at the position again: its agent registers, then it gets warm."""
        scene = self.scene
        there = scene.at_position[position]
        if there != m and scene.ready(there) and not scene.machines[there].leaving:
            return
        if scene.world.registered(m):
            self.leave(m)
        machine = scene.machines[m] = Machine(State.READY, scene.machines[m].life + 1)
        scene.at_position[position] = m
        if scene.world.job().end is not None:
            return
        scene.world.undrain(m)
        scene.world.register(m, warm=False, labels=scene.labels(m))
        scene.agenda.after(scene.costs.standby.warm_s, lambda: self._warmed(m, machine.life))
        self.care()

    def _warmed(self, m: int, life: int) -> None:
        scene = self.scene
        if scene.machines[m].life == life and scene.ready(m) and m not in scene.slots:
            scene.world.set_warm(m, warm=True)
            self.care()

    def care(self) -> None:
        """Ask the coordinator, unless everything is steady: then a host more or less in the pool changes nothing."""
        job = self.scene.world.job()
        if self.scene.progress.stopped is not None or job.open_ops() or job.leader is None:
            self.ask()

    # -- drains
    def _drain(self, m: int, position: int, event: Event) -> None:
        """The host is asked for; another machine comes to its position after ``back_s``, if need be before this one has left."""
        scene, machine = self.scene, self.scene.machines[m]
        if machine.state is not State.READY or machine.leaving:
            return
        self._requests += 1
        op = f"d{self._requests:07d}"
        if not scene.world.drain(m, op, event.cause or event.kind.value):
            return
        machine.leaving, machine.blame = op, event.kind
        successor = (m + scene.hosts) % (2 * scene.hosts)
        scene.agenda.after(event.back_s, lambda: self._succeed(successor, position), tied=False)
        self.ask()

    def _succeed(self, m: int, position: int) -> None:
        if self.scene.machines[m].state is State.OUT:
            self._arrive(m, position)
        else:  # the last exchange of this position is still going on
            self.scene.agenda.after(RETRY_S, lambda: self._succeed(m, position), tied=False)

    def blamed_on_an_alarm(self, op: str) -> bool:
        """The request drains a healthy host."""
        asked = next((m for m in self.scene.machines.values() if m.leaving and m.leaving == op), None)
        return asked is not None and asked.blame is Fault.ALARM

    def relaunchable(self) -> bool:
        """Enough machines are there for all slots."""
        return sum(map(self.scene.ready, self.scene.at_position)) >= self.scene.shape.nodes
