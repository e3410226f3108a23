"""What follows from a committed map, from the end of a job and of a drain: who works where, from which step, and how long that takes.

May not know: how it was decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tmrun.core.membership import Job
from tmrun.core.model import Kind, OpState, RankMap
from tmrun.sim.hosts import RETRY_S, Hosts
from tmrun.sim.ledger import Term
from tmrun.sim.scene import Scene, State
from tmrun.sim.trace import Event, Fault

JOINER_LOST = Event(0.0, (), Fault.EXIT, "failed before it took its ranks over")
STILL_SICK = Event(0.0, (), Fault.EXIT, "failed again after the restart")


@dataclass
class Epochs:
    """``ask``: the coordinator should look; ``launch``: start the job anew."""

    scene: Scene
    hosts: Hosts
    ask: Callable[[], None]
    launch: Callable[[], None]

    def begin(self, current: RankMap) -> None:
        """A map was committed."""
        (self._restart if current.kind is Kind.RESTART else self._switch)(current)

    # -- migrations
    def _switch(self, current: RankMap) -> None:
        scene = self.scene
        scene.counts[f"{current.kind.value} migrations"] += 1
        scene.counts["moves"] += len(current.moves)
        before = scene.slots
        scene.reseat()
        scene.progress.slow -= before.keys() - scene.slots.keys()
        if current.kind is Kind.FAILURE:
            scene.progress.back_to_step(current.resume.target)
            scene.counts["rollbacks"] += current.resume.rollback
        for move in current.moves:
            joiner = scene.world.number(move.joiner.host)
            scene.broken.discard(move.slot)
            scene.told.discard(move.slot)
            scene.world.set_warm(joiner, warm=False)
            if current.kind is Kind.FAILURE:
                scene.world.claim(move.slot, joiner, joined=False)
            if not scene.ready(joiner):
                scene.broken.add(move.slot)
                scene.agenda.after(0.0, partial(self.hosts.tell, joiner, scene.machines[joiner].life, JOINER_LOST))
        scene.switching, scene.progress.stopped = scene.switching + 1, Term.SWITCH
        scene.agenda.after(scene.costs.expected_s, lambda: self._resumed(current))

    def _resumed(self, current: RankMap) -> None:
        """The joiners have their state."""
        scene, every = self.scene, self.scene.costs.snapshot.every_steps
        newest = scene.world.job().map
        if newest is None or newest.generation != current.generation:
            return
        scene.switching -= 1
        for move in current.moves:
            joiner = scene.world.number(move.joiner.host)
            if newest.seats[move.slot] != move.joiner:
                continue
            if current.kind is Kind.DRAIN:
                scene.world.release(move.slot)
            if scene.ready(joiner) and move.slot not in scene.broken:
                scene.world.claim(move.slot, joiner, joined=True)
                scene.copied_at[move.slot] = (scene.progress.step // every + 1) * every
        scene.go_on()
        self.hosts.care()

    def finish_drains(self, job: Job) -> None:
        """Hosts whose request is answered leave, and the request is forgotten."""
        scene = self.scene
        for op in job.ops.values():
            m = scene.world.number(op.hosts[0])
            machine = scene.machines[m]
            if machine.leaving == op.id and op.state is not OpState.OPEN:
                machine.leaving = ""
                if op.state is OpState.DONE and m not in scene.slots:
                    self.hosts.leave(m)
                    scene.world.undrain(m)
                scene.world.forget_op(op.id)

    # -- restarts
    def _restart(self, current: RankMap) -> None:
        """All workers end and start again from the last checkpoint."""
        scene = self.scene
        scene.counts["restarts"] += 1
        scene.progress.back_to_checkpoint()
        scene.world.stop_workers()
        scene.reseat()
        scene.told, scene.copied_at, scene.switching, scene.progress.alarm = set(), {}, 0, False
        working = {s for m, s in scene.slots.items() if scene.ready(m)}
        scene.broken = set(range(scene.shape.nodes)) - working
        scene.progress.slow &= scene.slots.keys()
        scene.restarting, scene.progress.stopped = True, Term.RESTART
        scene.agenda.after(scene.costs.framework_s(scene.shape.gpus), lambda: self._restarted(current.epoch))

    def _restarted(self, epoch: int) -> None:
        scene = self.scene
        if scene.world.job().epoch != epoch:
            return
        scene.restarting = False
        for m in scene.world.warm():
            if m in scene.slots and scene.ready(m):
                scene.world.set_warm(m, warm=False)
        scene.world.start_workers()
        for m, slot in scene.slots.items():
            if scene.machines[m].state is State.SICK:  # a restart does not heal: its workers die as soon as they train
                scene.broken.add(slot)
                scene.agenda.after(scene.costs.detect.exit_s, partial(self.hosts.tell, m, scene.machines[m].life, STILL_SICK))
        scene.go_on()
        self.ask()

    def end(self) -> None:
        """The core gave the job up: somebody launches it again."""
        scene, r = self.scene, self.scene.costs.restart
        scene.counts["jobs ended"] += 1
        scene.progress.back_to_checkpoint()
        scene.progress.stopped, scene.progress.alarm = Term.RESTART, False
        delay = r.cleanup_s + r.reschedule_s + scene.costs.framework_s(scene.shape.gpus)
        scene.agenda.after(delay, self._relaunch, tied=False)

    def _relaunch(self) -> None:
        if self.hosts.relaunchable():
            self.launch()
        else:
            self.scene.agenda.after(RETRY_S, self._relaunch, tied=False)
