"""What parked workers say in a failure, by the rules of ``tmrun.worker``: whose state, snapshots and random state each of them holds.

    replicas    the slots that ``Shape.holders`` names hold a copy of a slot's state
    snapshots   the next slot keeps the last copy of a slot's shards, since its present seat has been there for one
    witnesses   two other slots (``planner.witness_slots``) keep a slot's random state and data position, as of the last step vote

Only those that hold anything of a moved slot are asked, and one more for the step. May not know: how they are told, time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tmrun.core import planner
from tmrun.core.model import WorkerVote
from tmrun.sim.shape import Shape


@dataclass(frozen=True, slots=True)
class Parked:
    """The moment. ``newest``: step of the last snapshot, None when none are kept. ``copied_at``: slot -> first step whose snapshot its
    present seat can hold of its neighbour."""

    shape: Shape
    step: int
    newest: int | None
    copied_at: Mapping[int, int]
    idle_s: float = 0.0
    """Since the last vote was entered."""

    def votes(self, moved: Collection[int], living: Collection[int]) -> dict[int, tuple[WorkerVote, ...]]:
        """Slot -> the votes of its workers; ``living``: slots that stay and work."""
        covers: dict[int, list[int]] = {s: [] for s in sorted(living)[:1]}
        witnessed: dict[int, list[int]] = {}
        for lost in sorted(moved):
            for holder in self.shape.holders(lost):
                covers.setdefault(holder, []).append(lost)
            for keeper in planner.witness_slots(lost, self.shape.nodes):
                witnessed.setdefault(keeper, []).append(lost)
        told = sorted((covers.keys() | witnessed.keys()) & set(living))
        return {slot: tuple(self._of_slot(slot, covers.get(slot, []), witnessed.get(slot, []))) for slot in told}

    def _of_slot(self, slot: int, covers: list[int], witnessed: list[int]) -> Iterator[WorkerVote]:
        nproc = self.shape.nproc
        for local in range(nproc):
            own, ward = slot * nproc + local, (slot - 1) % self.shape.nodes * nproc + local
            kept: dict[int, tuple[int, ...]] = {}
            if self.newest is not None:
                kept[self.newest] = (own, ward) if self.newest >= self.copied_at.get(slot, 0) else (own,)
            ranks = tuple(s * nproc + local for s in witnessed)
            known = {self.step - 1: ranks} if ranks else {}
            yield WorkerVote(own, self.step, self.step, tuple(s * nproc + local for s in covers), kept, known, self.idle_s)
