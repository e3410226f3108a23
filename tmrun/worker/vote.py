"""The step vote: decides whether a step happened, and leaves with *witnesses* what a successor of each rank will need.

Every rank votes once a step, when its gradients are complete and before the first update:

    give    its blob (random state, data position: what no replica knows) goes to its witnesses, one or two ranks on other nodes
    hold    it waits for the blobs of its wards, the ranks whose witness it is
    spread  ceil(log2(world)) rounds (the dissemination barrier of Hensgen, Finkel and Manber, 1988): in round j it tells the rank 2^j
            ahead what it has heard of so far, and hears from the rank 2^j behind; what is told are minima and maxima of a few numbers

A round is one small message; its receive was posted before, so nobody waits for a handshake. If everybody is everybody's
witness, the first message has said it all and nothing is spread. Why it is safe to act on:

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

import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from tmrun.core import planner
from tmrun.core.errors import WorkerError
from tmrun.worker import values
from tmrun.worker.comm import LONG, Backend

_NUMBERS = struct.Struct("<8q")
FIRST_CAPACITY = 1 << 15
_GIVE, _SPREAD = 20, 21


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
    longest: int
    """Bytes of the longest first message."""

    @staticmethod
    def of(ballot: Ballot, longest: int) -> Tally:
        """One rank's own."""
        step, ready, held = ballot.step, ballot.ready, ballot.held
        return Tally(step, step, ready, ready, held, held, ballot.every, longest)

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
            max(a.longest, b.longest),
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


Arrival = tuple[dist.Work, bytearray]
"""A receive that was posted, and where it arrives."""


class Poll:
    """The votes that are held over one communicator. Made anew, with nothing assumed of the others, when it is replaced."""

    def __init__(self, control: Backend, rank: int, local_world: int, capacity: int = FIRST_CAPACITY) -> None:
        self.control = control
        self.capacity = capacity
        self._rank, self._world = rank, control.size()
        self._witnesses = witnesses_of(rank, self._world, local_world)
        self._wards = wards_of(rank, self._world, local_world)
        alone = len(self._wards) == self._world - 1
        self._rounds = 0 if alone else (self._world - 1).bit_length()
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._given: dict[int, Arrival] = {}
        self._heard: list[Arrival] = []
        self._expected = False
        self._rooms: dict[tuple[int, int], tuple[bytearray, torch.Tensor]] = {}
        """By sender and tag: what one vote received has been read when the next one is expected. A torch call a message costs more."""

    def _expect(self) -> None:
        """Post all receives of the next vote, unless that is done."""
        if self._expected:
            return
        room = _NUMBERS.size + self.capacity
        self._given = {ward: self._receive(ward, room, _GIVE) for ward in self._wards}
        self._heard = [self._receive((self._rank - (1 << j)) % self._world, _NUMBERS.size, _SPREAD + j) for j in range(self._rounds)]
        self._expected = True

    def vote(self, ballot: Ballot, blob: bytes, hold: Callable[[int, bytes], None]) -> Tally:
        """Vote; ``hold(ward, blob)`` has to keep what it is given. Raises RuntimeError when the vote is lost here; others may have passed.

        All ranks have the same room for a blob. If somebody's does not fit, all see it, make room and vote once more.
        """
        tally = self._once(ballot, blob, hold)
        if tally.longest > self.capacity:
            self.capacity = 1 << (tally.longest - 1).bit_length()
            tally = self._once(ballot, blob, hold)
        with contextlib.suppress(RuntimeError):  # a peer that needs no next vote (a drain) may have hung up; this one has passed
            self._expect()
        if tally.first_step != tally.last_step:
            raise WorkerError(f"ranks are in different steps, {tally.first_step} to {tally.last_step}; do all run the same loop?")
        return tally

    def _once(self, ballot: Ballot, blob: bytes, hold: Callable[[int, bytes], None]) -> Tally:
        self._expect()
        before, self._sent, self._expected = self._sent, [], False
        tally = Tally.of(ballot, len(blob))
        message = _pack(tally) + (blob if len(blob) <= self.capacity else b"")
        for witness in self._witnesses:
            self._send(witness, message, _GIVE)
        for ward, (work, buffer) in self._given.items():
            _await(work)
            theirs = _unpack(buffer)
            if theirs.longest <= self.capacity:
                hold(ward, bytes(memoryview(buffer)[_NUMBERS.size : _NUMBERS.size + theirs.longest]))
            tally = tally.with_(theirs)
        for j, (work, buffer) in enumerate(self._heard):
            self._send((self._rank + (1 << j)) % self._world, _pack(tally), _SPREAD + j)
            _await(work)
            tally = tally.with_(_unpack(buffer))
        del before  # nobody waited for them, but this vote could not have passed before they arrived
        return tally

    def _send(self, to: int, message: bytes, tag: int) -> None:
        tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._sent.append((self.control.send([tensor], to, tag), tensor))

    def _receive(self, sender: int, size: int, tag: int) -> Arrival:
        buffer, tensor = self._rooms.get((sender, tag), (bytearray(), None))
        if tensor is None or len(buffer) != size:  # a shorter message fits as well
            buffer = bytearray(size)
            tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            self._rooms[sender, tag] = buffer, tensor
        return self.control.recv([tensor], sender, tag), buffer


def exchange_signatures(control: Backend, signature: bytes) -> tuple[bytes, ...]:
    """Everybody's, by rank; before a vote, so that who passes it knows them all."""
    everyone = torch.empty(control.size() * len(signature), dtype=torch.uint8)
    control._allgather_base(everyone, torch.frombuffer(bytearray(signature), dtype=torch.uint8)).wait()
    return tuple(values.tensor_bytes(row) for row in everyone.view(control.size(), -1))


def _await(work: dist.Work) -> None:
    """Here a rank waits for a slower one."""
    work.wait(LONG)


def _pack(tally: Tally) -> bytes:
    return _NUMBERS.pack(*tally)


def _unpack(buffer: bytearray) -> Tally:
    return Tally._make(_NUMBERS.unpack_from(buffer))
