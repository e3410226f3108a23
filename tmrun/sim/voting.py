"""When the nodes answer an open migration, and what: all say yes, the stayers at one instant.

May not know: what is decided by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tmrun.core.membership import Stored
from tmrun.core.model import Host, Kind, Migration, Vote, WorkerVote
from tmrun.sim.parked import Parked
from tmrun.sim.scene import Scene


@dataclass
class Voting:
    """``ask``: the coordinator should look."""

    scene: Scene
    ask: Callable[[], None]
    _plain: dict[int, Stored[Vote]] = field(default_factory=dict)
    """Machine -> the yes of its present life that says nothing more."""

    def open(self, migration: Migration) -> None:
        """It was proposed: the participants prepare."""
        move, failure = self.scene.costs.move, migration.kind is Kind.FAILURE
        self.scene.agenda.after(move.prepare_s, lambda: self._stayers(migration.id, failure))
        self.scene.agenda.after(max(move.prepare_s, move.bind_s) + 1e-3, lambda: self._movers(migration.id))

    def _stayers(self, number: int, failure: bool) -> None:
        scene = self.scene
        migration = scene.world.job().open_migration
        if migration is None or migration.id != number:
            return
        moved = migration.slots
        staying = {slot: m for m, slot in scene.slots.items() if slot not in moved and slot not in scene.broken and scene.ready(m)}
        told = self._workers(migration, staying) if failure else {}
        votes: dict[Host, Stored[Vote]] = {}
        for slot, m in staying.items():
            vote = self._vote(m, told.get(slot, ()))
            votes[vote.value.host] = vote
        scene.world.crowd(votes, number)
        self.ask()

    def _vote(self, m: int, workers: tuple[WorkerVote, ...]) -> Stored[Vote]:
        seat = self.scene.world.seat(m)
        if workers:
            return Stored(Vote(seat.host, seat.incarnation, 0, True, workers=workers), "", 0, 0)
        known = self._plain.get(m)
        if known is None or known.value.incarnation != seat.incarnation:
            known = self._plain[m] = Stored(Vote(seat.host, seat.incarnation, 0, True), "", 0, 0)
        return known

    def _workers(self, migration: Migration, staying: dict[int, int]) -> dict[int, tuple[WorkerVote, ...]]:
        """Slot -> what its parked workers say, of those whom it concerns."""
        scene, progress = self.scene, self.scene.progress
        idle_s = scene.agenda.now - scene.halted_at
        parked = Parked(scene.shape, progress.step, progress.snapshot_step, scene.copied_at, idle_s)
        return parked.votes(migration.slots, staying.keys())

    def _movers(self, number: int) -> None:
        scene = self.scene
        migration = scene.world.job().open_migration
        if migration is None or migration.id != number:
            return
        for move in migration.moves:
            joiner, leaver = scene.world.number(move.joiner.host), scene.world.number(move.leaver.host)
            if scene.ready(joiner):
                scene.world.vote(joiner)
            if migration.kind is Kind.DRAIN and scene.ready(leaver) and move.slot not in scene.broken:
                scene.world.vote(leaver, stop_step=scene.progress.step + 1)
        self.ask()
