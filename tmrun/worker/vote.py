"""The step vote: decides whether a step happened, and leaves with *witnesses* what a successor of each rank will need.

Every rank votes once a step, when its gradients are complete and before the first update:

    give    its blob (random state, data position: what no replica knows) goes to its witnesses, one or two ranks on other nodes
    hold    it waits for the blobs of its wards, the ranks whose witness it is
    spread  ceil(log2(world)) rounds (the dissemination barrier of Hensgen, Finkel and Manber, 1988): in round j it tells the rank 2^j
            ahead what it has heard of so far, and hears from the rank 2^j behind; what is told are minima and maxima of a few numbers

A round is one small message (``wires``). If everybody is everybody's witness, the first message has said it all and nothing is spread.
Why it is safe to act on:

    A  That the vote passed on one rank proves that every rank entered it: what it heard depends on a message of every rank.
    B  It also proves that every witness holds its wards' blobs of this vote, in the process that passed or in another: a rank spreads
       only what it heard after it held them, and A says that all did. (Nothing to spread: the passing rank holds all of them itself.)
    So, if rank r dies and the step was k:
    - somebody alive passed k: all gradients were complete, the step counts; the successor of r starts from r's blob of vote k, which
      each living witness of r has (B), whether or not that witness saw the vote pass.
    - nobody alive passed k: the step is redone by all, the successor starts from r's blob of vote k - 1. Somebody alive passed that one
      (else k would not have begun), so B holds for it, and a witness keeps the last two blobs of a ward. Whoever passed k and died has
      told nobody, and its update is gone with it.
    r and one witness: the other witness. r and all its witnesses at once: nobody knows r's random state; the planner takes a snapshot of
    everybody or starts all anew. A witness that is itself new is given its wards' blobs before it counts as there (``handover``).

May not know: what is in a blob, what follows from the result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tmrun.core import planner
from tmrun.core.errors import WorkerError
from tmrun.worker import values
from tmrun.worker.comm import Backend
from tmrun.worker.wires import Wires

_NUMBERS = struct.Struct("<7q")
_LENGTH = struct.Struct("<q")


def witnesses_of(rank: int, world: int, local_world: int) -> tuple[int, ...]:
    """Who keeps what only ``rank`` knows: its likes on two other nodes (``planner.witness_slots``); with a single node, two other ranks."""
    stride = local_world if local_world < world else 1
    slot, local = divmod(rank, stride)
    return tuple(other * stride + local for other in planner.witness_slots(slot, world // stride))


def wards_of(rank: int, world: int, local_world: int) -> tuple[int, ...]:
    """Whose witness ``rank`` is."""
    return tuple(r for r in range(world) if rank in witnesses_of(r, world, local_world))


@dataclass(frozen=True)
class Ballot:
    """What one rank says, its gradients being complete: ``ready`` = id of the migration it has built, or 0.

    ``held`` and ``every``: its newest safe snapshot (-1: none), and how many steps it wants between two.
    """

    step: int
    ready: int = 0
    held: int = -1
    every: int = 1


class Tally(NamedTuple):
    """What a set of ranks said: lowest and highest numbers."""

    first_step: int
    last_step: int
    least_ready: int
    most_ready: int
    least_held: int
    most_held: int
    every: int

    @staticmethod
    def of(ballot: Ballot) -> Tally:
        """One rank's own."""
        step, ready, held = ballot.step, ballot.ready, ballot.held
        return Tally(step, step, ready, ready, held, held, ballot.every)

    def with_(self, other: Tally) -> Tally:
        """Both sets together."""
        a, b = self, other
        return Tally(
            min(a.first_step, b.first_step),
            max(a.last_step, b.last_step),
            min(a.least_ready, b.least_ready),
            max(a.most_ready, b.most_ready),
            min(a.least_held, b.least_held),
            max(a.most_held, b.most_held),
            max(a.every, b.every),
        )

    @property
    def step(self) -> int:
        """The step that everybody voted on."""
        return self.first_step

    def agreed(self, migration: int) -> bool:
        """Whether all ranks are ready for this migration."""
        return self.least_ready == self.most_ready == migration

    def all_hold(self, snapshot: int) -> bool:
        """Whether this snapshot is safe on all ranks."""
        return self.least_held == self.most_held == snapshot


class Poll:
    """The votes that are held over one set of connections. Made anew, with nothing assumed of the others, when it is replaced."""

    def __init__(self, wires: Wires, rank: int, world: int, local_world: int) -> None:
        self.wires = wires
        self._rank, self._world = rank, world
        self._witnesses = witnesses_of(rank, world, local_world)
        self._wards = wards_of(rank, world, local_world)
        self._rounds = rounds(world, len(self._wards))

    def vote(self, ballot: Ballot, blob: bytes, hold: Callable[[int, bytes], None]) -> Tally:
        """Vote; ``hold(ward, blob)`` has to keep what it is given.

        Raises RuntimeError when the vote is lost here; others may have passed.
        """
        wires, tally = self.wires, Tally.of(ballot)
        message = _NUMBERS.pack(*tally) + _LENGTH.pack(len(blob)) + blob
        for witness in self._witnesses:
            wires.send(witness, message)
        for ward in self._wards:
            head = wires.receive(ward, _NUMBERS.size + _LENGTH.size)
            hold(ward, bytes(wires.receive(ward, *_LENGTH.unpack_from(head, _NUMBERS.size))))
            tally = tally.with_(_unpack(head))
        for j in range(self._rounds):
            wires.send((self._rank + (1 << j)) % self._world, _NUMBERS.pack(*tally))
            tally = tally.with_(_unpack(wires.receive((self._rank - (1 << j)) % self._world, _NUMBERS.size)))
        if tally.first_step != tally.last_step:
            raise WorkerError(f"ranks are in different steps, {tally.first_step} to {tally.last_step}; do all run the same loop?")
        return tally


def rounds(world: int, wards: int) -> int:
    """How often what was heard is spread."""
    return 0 if wards == world - 1 else (world - 1).bit_length()


def peers_of(rank: int, world: int, local_world: int) -> set[int]:
    """Whom ``rank`` sends to, or hears from, in a vote."""
    wards = wards_of(rank, world, local_world)
    spread = {(rank + sign * (1 << j)) % world for j in range(rounds(world, len(wards))) for sign in (1, -1)}
    return {*witnesses_of(rank, world, local_world), *wards} | spread


def exchange_signatures(control: Backend, signature: bytes) -> tuple[bytes, ...]:
    """Everybody's, by rank; before a vote, so that who passes it knows them all."""
    everyone = torch.empty(control.size() * len(signature), dtype=torch.uint8)
    control._allgather_base(everyone, torch.frombuffer(bytearray(signature), dtype=torch.uint8)).wait()
    return tuple(values.tensor_bytes(row) for row in everyone.view(control.size(), -1))


def _unpack(message: bytearray) -> Tally:
    return Tally._make(_NUMBERS.unpack_from(message))
