"""The roles that a standby rehearses beside that of the rank it was given, so that nothing of them is compiled or imported for the first
time when it is needed as one.

    parked as its own rank, which the agent was told --a role it has not rehearsed--> runs the script as a rank of it --> parked
       |  ^--------- none is left: runs the script as its own rank once more ------------------------------------------------'
       '--Prepare, at any time--> ``called``: where a rehearsal of another rank next begins a step or communicates, it is given up

Roles are those of ``record``: ranks whose state looks alike. Asked are the ranks of the first, middle and last slot at this process's place
in its node; where ranks are symmetric, that is one role. A script that ends early, or fails, as another role is not run as that role again.
What a pass takes is what a caller may have to wait for (compiling cannot be given up): none is made after a long one, and a process that
does not come when it is called ends, so that the job takes another standby instead of waiting for this one.
May not know: how the script is run again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from tmrun import wire
from tmrun.worker import record
from tmrun.worker.agent_store import AgentStore
from tmrun.worker.board import Board, Pending
from tmrun.worker.identity import Identity
from tmrun.worker.link import fence

_SHARE = 0.25
"""Of the time that a job waits for a joiner: after a longer pass no more are made, and so long a call may wait."""
_PATIENCE_S = 300.0
"""That time, where nobody says."""
_LOOK_S = 1.0


@dataclass
class Tour:
    """Of one process. ``home``: the rank that it was given, or called for last."""

    home: int
    open_store: Callable[[], AgentStore]
    told: bool = False
    """The agent knows that it is warm, so it may be called."""
    away: bool = False
    """A pass as another rank than ``home`` is under way."""
    longest_s: float = 0.0
    _rehearsed: set[int] = field(default_factory=set)
    _tried: set[int] = field(default_factory=set)

    @property
    def also(self) -> tuple[int, ...]:
        """Ranks that were rehearsed, beside ``home``."""
        return tuple(sorted(self._rehearsed - {self.home}))

    def begin(self, rank: int) -> None:
        """The script runs again, as ``rank``."""
        self.away = self.told and rank != self.home

    def rehearsed(self, rank: int, seconds: float) -> None:
        """A pass is over."""
        self.away = False
        self.longest_s = max(self.longest_s, seconds)
        self._rehearsed.add(rank)
        self._tried.add(rank)

    def called(self, board: Board, rank: int) -> int | None:
        """As whom a rehearsal of ``rank`` is to be given up, if it is."""
        newest = board.newest if self.told else None
        if newest is None or newest.prepare.rank == rank:
            return None
        self.home = newest.prepare.rank
        return self.home

    def expect(self, pending: Pending, rank: int) -> None:
        """Somebody calls while ``rank`` is rehearsed: end this process if it goes on with that, and it is not what they want."""
        if self.away and pending.prepare.rank != rank:
            patience_s = _SHARE * (record.patience_s() or _PATIENCE_S)
            timer = threading.Timer(patience_s, self._give_up, [pending, patience_s])
            timer.daemon = True
            timer.start()

    def _give_up(self, pending: Pending, patience_s: float) -> None:
        if self.away and not pending.gone:
            fence(f"it is needed as rank {pending.prepare.rank}, and for {patience_s:g} s has not come back from rehearsing another role")

    def way_back(self, rank: int) -> int | None:
        """The rank to run the script as, when it ended by itself as ``rank``; None: that is its end."""
        self._tried.add(rank)
        return self.home if self.told and rank != self.home else None

    def next(self, board: Board, who: Identity) -> int | None:
        """The rank to rehearse now; None: stay as it is. Waits until roles are known, or somebody calls."""
        if board.newest is not None:
            return None
        patience_s = record.patience_s()
        only_own = os.environ.get(wire.ENV_ROLES) == "0" or not record.largest()
        if only_own or self.longest_s > _SHARE * (patience_s or _PATIENCE_S):
            return self._home(who)
        end, store = time.monotonic() + patience_s, self.open_store()
        try:
            while board.newest is None:
                roles = {rank: record.role_in(store, who.generation, rank) for rank in {*candidates(who), *self._tried}}
                known = {roles[rank] for rank in self._tried}
                for rank in candidates(who):
                    if roles[rank] and "" not in known and roles[rank] not in known:
                        return rank
                if all(roles.values()) or time.monotonic() >= end:
                    break
                board.wait(lambda: board.newest is not None, _LOOK_S)
        except dist.DistStoreError:
            pass  # the store is away: a standby that knows one role is one
        finally:
            store.dispose()
        return None if board.newest is not None else self._home(who)

    def _home(self, who: Identity) -> int | None:
        return self.home if who.rank != self.home else None


def candidates(who: Identity) -> list[int]:
    """Ranks that stand for the roles there may be, at this process's place in its node."""
    slots = who.world // who.local_world
    return sorted({slot * who.local_world + who.local_rank for slot in (0, slots // 2, slots - 1)})
