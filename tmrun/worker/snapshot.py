"""Copies of every rank's state in host memory, for shards that no other rank holds.

Taken only where some rank has no replica. Everybody copies its state at the same boundary (the only part that training waits for) and
sends the copy in the background to a *partner* on another node, who keeps it beside its own. After a loss everybody goes back to the
newest snapshot of which every stayer has its own copy and every lost rank's partner the lost one.

Which boundaries, all ranks agree on in the votes: a ballot says which snapshot is safe here (``held``: taken, and the ward's copy of it
arrived) and how many steps should lie between two (``every``). When the last one is safe everywhere, the next is due ``max(every)``
steps after it. So the last safe one is never overwritten before the next is safe, two generations are enough, and slow sending
makes snapshots rarer, never training slower. After a switch everybody takes a new one at once.
May not know: how a migration was agreed, sockets.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.core.model import Copies
from tmrun.worker import transfer, vote
from tmrun.worker.agent_store import AgentStore
from tmrun.worker.courier import Courier, Route
from tmrun.worker.state import State
from tmrun.worker.transfer import Parcel

OVERHEAD = 0.01
"""Share of the training time that copying and sending may take when the interval is chosen by measurement."""
FIRST_VOTE = 2
"""The vote after which replicas are known for good (signatures are taken in votes 0, 1, 2)."""


def partner_of(rank: int, world: int, local_world: int) -> int:
    """Who keeps the copy of ``rank``: its like half the job away, for neighbours share racks and switches and are lost together; with a
    single node, another rank."""
    stride = local_world if local_world < world else 1
    return (rank + max(1, world // stride // 2) * stride) % world


def needed(signatures: Sequence[bytes]) -> bool:
    """Whether some rank has no replica (a lone rank has no partner either)."""
    return len(signatures) > 1 and any(signatures.count(s) == 1 for s in signatures)


def every_from_environment() -> int | None:
    """What the operator asks for. Raises WorkerError."""
    text = os.environ.get(wire.ENV_SNAPSHOT_EVERY)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise WorkerError(f"{wire.ENV_SNAPSHOT_EVERY}={text!r}: expected a number of steps, at least 1")
    return int(text)


class Snapshots:
    """One rank's copies: its own and its ward's, by step."""

    def __init__(self, open_store: Callable[[], AgentStore], tell: Callable[[wire.Copied], None] = lambda _: None) -> None:
        """``tell``: of each copy that arrived, on the courier's thread."""
        self._open_store, self._tell = open_store, tell
        self.configured: int | None = None
        self._every = 1
        self._rank = self._partner = self._ward = -1
        self._lock = threading.Lock()
        self._own: dict[int, Parcel] = {}
        self._wards: dict[int, Parcel] = {}
        self._courier: Courier | None = None
        self._safe: int | None = None
        self._taken: int | None = None
        self._arrived: int | None = None
        self._due: int | None = None
        self._copy_s = self._send_s = 0.0

    def place(self, rank: int, world: int, local_world: int) -> None:
        """Which rank we are, and so who our partner and our ward are."""
        self._rank, self._partner = rank, partner_of(rank, world, local_world)
        self._ward = next(r for r in range(world) if partner_of(r, world, local_world) == rank)

    def stop(self) -> None:
        """Cut the connections and forget everything (soft restart)."""
        if self._courier is not None:
            self._courier.close()
            self._courier = None
        self._own, self._wards = {}, {}
        self._safe = self._taken = self._arrived = self._due = None

    # -- when -----------------------------------------------------------------------------------------------------------------------
    @property
    def held(self) -> int:
        """For our ballot: the newest step that is safe here, or -1."""
        return self._taken if self._taken is not None and self._arrived == self._taken else -1

    def every(self, step_s: float) -> int:
        """For our ballot: how many steps should lie between two snapshots, so that they cost ``OVERHEAD``."""
        if self.configured is not None:
            self._every = self.configured
        else:
            self._every = max(1, math.ceil((self._copy_s + self._send_s) / (OVERHEAD * step_s))) if step_s else 1
        return self._every

    def agree(self, tally: vote.Tally, signatures: Sequence[bytes]) -> None:
        """After a vote: when is the next one due? The same answer everywhere."""
        self._due = None
        if tally.step < FIRST_VOTE or not needed(signatures):
            return
        if self._taken is None:
            self._due = tally.step + 1
        elif tally.all_hold(self._taken):
            self._safe = self._taken
            self._due = max(tally.step + 1, self._taken + tally.every)

    def is_due(self, step: int) -> bool:
        """Whether to take one at the boundary before ``step``."""
        return self._due == step

    def switched(self, scope: str, target: int, signatures: Sequence[bytes]) -> None:
        """Ranks moved: old connections are void, a new snapshot is due at ``target``; what is safe stays."""
        if self._courier is not None:
            self._courier.close()
            self._courier = None
        with self._lock:
            for kept in (self._own, self._wards):
                for step in [s for s in kept if s > target]:
                    del kept[step]
        self._taken = self._arrived = self._due = None
        if needed(signatures):
            self._due = target
            self._listen(scope)

    # -- taking ---------------------------------------------------------------------------------------------------------------------
    def take(self, scope: str, step: int, state: State, tree: dict[str, Any]) -> None:
        """Copy our state, and send the copy on its way."""
        with self._lock:
            spare = self._evict()
            self._taken, self._due = step, None
        self._listen(scope)
        parcel, self._copy_s = transfer.pack(state, tree, spare)
        with self._lock:
            self._own[step] = parcel
        assert self._courier is not None
        self._courier.send(step, parcel)

    def _listen(self, scope: str) -> None:
        if self._courier is None:
            route = Route(self._rank, self._partner, scope)
            self._courier = Courier(route, self._open_store, self._on_sent, self._on_received).start()

    def _evict(self) -> Parcel | None:
        """Keep the last one that is safe everywhere, and the newest; the buffers of an older one are used again."""
        spare = None
        for kept in (self._own, self._wards):
            for step in set(kept) - {self._safe, max(kept, default=None)}:
                old = kept.pop(step)
                spare = old if kept is self._own else spare
        return spare

    def _on_sent(self, step: int, seconds: float) -> None:
        self._send_s = seconds
        with self._lock:
            parcel = self._own.get(step)
        if parcel is not None:
            size = len(parcel.body) + sum(bucket.nbytes for bucket in parcel.buckets)
            self._tell(wire.Copied(step, Copies(self._every, size, self._copy_s, seconds)))

    def _on_received(self, step: int, parcel: Parcel) -> None:
        with self._lock:
            self._wards[step] = parcel
            self._arrived = step

    # -- using ----------------------------------------------------------------------------------------------------------------------
    def holdings(self) -> dict[int, tuple[int, ...]]:
        """Step -> the ranks whose copies are here."""
        with self._lock:
            steps = sorted({*self._own, *self._wards})
            return {s: tuple(r for r, kept in self._kept() if s in kept) for s in steps}

    def copy_of(self, rank: int, step: int) -> Parcel:
        """A copy that ``holdings`` named."""
        with self._lock:
            return next(kept for owner, kept in self._kept() if owner == rank)[step]

    def _kept(self) -> Iterable[tuple[int, dict[int, Parcel]]]:
        return ((self._rank, self._own), (self._ward, self._wards))
