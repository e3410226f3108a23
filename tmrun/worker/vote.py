"""The step vote: one all-gather that decides whether a step happened.

Every rank calls ``Voter.run`` once a step, when its gradients are complete and before the first update. That the gather completed on
*one* rank proves that *all* ranks entered it; so if anybody passed, every gradient was complete and the step happens everywhere.

The gather carries, per rank, a header and a blob (what a successor of this rank would need beside its tensors). The room for a blob
is fixed and equal on all ranks. If somebody's blob does not fit, all see it in the headers, take the next power of two and gather
once more; the vote has passed when the last gather completed.
May not know: what is in a blob, what follows from the result.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from tmrun.core.errors import WorkerError
from tmrun.worker import values
from tmrun.worker.comm_gloo import Gloo

_HEADER = struct.Struct("<qqqqqq16s")
FIRST_CAPACITY = 1 << 14


@dataclass(frozen=True)
class Ballot:
    """What one rank says: ``good`` = no error was swallowed in this step; ``ready`` = id of the migration it has built, or 0.

    ``held`` and ``every``: its newest safe snapshot (-1: none), and how many steps it wants between two.
    """

    step: int
    good: bool
    ready: int
    signature: bytes
    blob: bytes
    held: int = -1
    every: int = 1


@dataclass(frozen=True)
class Result:
    """A passed vote: the ballots by rank."""

    step: int
    ballots: tuple[Ballot, ...]

    def agreed(self, migration: int) -> bool:
        """Whether all ranks are ready for this migration."""
        return all(b.ready == migration for b in self.ballots)


class Voter:
    """Holds the agreed capacity."""

    def __init__(self, capacity: int = FIRST_CAPACITY) -> None:
        self.capacity = capacity

    def run(self, control: Gloo, ballot: Ballot) -> Result:
        """Vote. Raises RuntimeError when the group is broken: the vote is lost, though others may have passed it."""
        rows = self._gather(control, ballot)
        longest = max(length(row) for row in rows)
        if longest > self.capacity:
            self.capacity = 1 << (longest - 1).bit_length()
            rows = self._gather(control, ballot)
        ballots = tuple(unpack(row) for row in rows)
        if any(b.step != ballot.step for b in ballots):
            raise WorkerError(f"ranks disagree about the step: {[b.step for b in ballots]}; do all run the same loop?")
        if bad := [rank for rank, b in enumerate(ballots) if not b.good]:
            raise WorkerError(f"ranks {bad} swallowed a communication error in step {ballot.step}; let it leave the with block")
        return Result(ballot.step, ballots)

    def _gather(self, control: Gloo, ballot: Ballot) -> list[bytes]:
        mine = torch.frombuffer(pack(ballot, self.capacity), dtype=torch.uint8)
        everyone = torch.empty(control.size() * mine.numel(), dtype=torch.uint8)
        control._allgather_base(everyone, mine).wait()
        return [values.tensor_bytes(row) for row in everyone.view(control.size(), -1)]


def pack(ballot: Ballot, capacity: int) -> bytearray:
    """One row of the gather. A blob that does not fit is left out; its length is not."""
    row = bytearray(_HEADER.size + capacity)
    _HEADER.pack_into(row, 0, ballot.step, ballot.good, ballot.ready, len(ballot.blob), ballot.held, ballot.every, ballot.signature)
    if len(ballot.blob) <= capacity:
        row[_HEADER.size : _HEADER.size + len(ballot.blob)] = ballot.blob
    return row


def unpack(row: bytes) -> Ballot:
    """The inverse of ``pack`` for a blob that fitted."""
    step, good, ready, size, held, every, signature = _HEADER.unpack_from(row)
    return Ballot(step, bool(good), ready, signature, row[_HEADER.size : _HEADER.size + size], held, every)


def length(row: bytes) -> int:
    """Length of the blob that its owner wanted to send."""
    return int(_HEADER.unpack_from(row)[3])
