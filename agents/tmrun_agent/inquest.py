"""When connections break and nobody has explained it yet: ask the witnesses of those who may be dead, and bury who is.

A broken connection is a hint, never a proof; ``witness`` has what proves a death. Workers of a plain script do not wait for an explanation
as others do: that they ended because they lost a peer is the same hint, and so is a lease that has run out.
The coordinator asks for everybody who holds a slot, any other agent whose workers doubt only for the coordinator, whom nobody else would
miss before its lease has run out. Asking happens on a thread of its own. May not know: what follows from a burial.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tmrun import witness
from tmrun.core import codec, losses
from tmrun.core.errors import StoreError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import Host, Member, Obituary, Seat
from tmrun.store.api import Store
from tmrun.store.burial import bury

ASK_EVERY_S = 0.25
MEET_AGAIN_S = 30.0
"""A witness that could not be reached is tried again so often: a link may have been down when a node joined."""
_AT_ONCE = 32


@dataclass
class Inquest:
    """``tell``: one line for the story, from the asking thread."""

    store: Store
    keys: Keys
    me: Seat
    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _asked: float = 0.0
    _met: dict[Seat, str] = field(default_factory=dict)
    """Those who could be reached once, or have no witness: who it is. A lease that runs out takes the record with it."""
    _meet_at: dict[Seat, float] = field(default_factory=dict)
    """When the others are tried again."""
    _reached: set[str] = field(default_factory=set)
    """Witnesses that could be reached while their launch lived."""
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _meeting: threading.Lock = field(default_factory=threading.Lock)
    """Apart, so that who cannot be reached never keeps us from asking."""

    def tend(self, job: Job, *, doubt: bool, leads: bool) -> None:
        """Once a turn. ``doubt``: our own workers wait for an explanation."""
        suspects = _suspects(job) if leads else _leader(job) if doubt or _broken(job) else ()
        suspects = tuple(s for s in suspects if s.host != self.me.host)
        strangers = () if suspects else self._strangers(job, leads=leads)
        if strangers and self._begin(tuple(strangers), self._meet, self._meeting):
            self._meet_at |= dict.fromkeys(strangers, self.clock() + MEET_AGAIN_S)
        if suspects and self.clock() - self._asked >= ASK_EVERY_S and self._begin(suspects, self._ask, self._busy):
            self._asked = self.clock()

    def _begin(self, seats: tuple[Seat, ...], each: Callable[[Seat], None], busy: threading.Lock) -> bool:
        """On a thread of its own; False: the last one is not done yet, or none can be had, and the next turn tries again."""
        if not busy.acquire(blocking=False):
            return False
        try:
            threading.Thread(target=self._run, args=(seats, each, busy), name="inquest", daemon=True).start()
        except RuntimeError:
            busy.release()
            return False
        return True

    def _strangers(self, job: Job, *, leads: bool) -> set[Seat]:
        """Those whom we may have to ask about one day, have never reached, and have not tried just now."""
        if job.end is not None:
            return set()
        now = self.clock()
        unmet = (who for who in (_seated(job) if leads else _leader(job)) if who.host != self.me.host and who not in self._met)
        return {who for who in unmet if self._meet_at.get(who, now) <= now}

    def _run(self, seats: tuple[Seat, ...], each: Callable[[Seat], None], busy: threading.Lock) -> None:
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(each, seats))
        finally:
            busy.release()

    def _member(self, host: Host) -> Member | None:
        entry = self.store.get(self.keys.member(host))
        return codec.decode(Member, entry.value) if entry is not None else None

    def _meet(self, seat: Seat) -> None:
        try:
            member = self._member(seat.host)
        except StoreError:
            return
        if member is None or member.seat != seat:
            return
        if member.witness and witness.reached(member.witness):
            self._reached.add(member.witness)
        if not member.witness or member.witness in self._reached:
            self._met[seat] = member.witness

    def _ask(self, seat: Seat) -> None:
        try:
            member = self._member(seat.host)
            here = member is not None and member.seat == seat
            where = member.witness if member is not None and here else self._met.get(seat, "")
            proof = witness.ask(where) if where else witness.Proof.NONE
            if not proof or (proof is witness.Proof.CLOSED and where not in self._reached):
                return
            if not here and self._buried(seat):
                return
            bury(self.store, self.keys, seat.host, seat.incarnation)
        except StoreError:
            return  # asked again
        self.tell(f"{seat.host} is gone: {proof.value}")

    def _buried(self, seat: Seat) -> bool:
        """Already, and a snapshot may not show it yet."""
        entry = self.store.get(self.keys.obituary(seat.host))
        return entry is not None and codec.decode(Obituary, entry.value).incarnation == seat.incarnation


def _seated(job: Job) -> tuple[Seat, ...]:
    return tuple(s for s in job.map.seats if job.alive(s)) if job.map else ()


def _leader(job: Job) -> tuple[Seat, ...]:
    return (Seat(job.leader.value.host, job.leader.value.incarnation),) if job.leader is not None else ()


def _suspects(job: Job) -> tuple[Seat, ...]:
    """Who holds a slot and is silent, and when somebody's workers lost a connection in this epoch everybody who holds one."""
    if job.end is not None or job.map is None:
        return ()
    silent = tuple(job.map.seats[i] for i in losses.vanished(job))
    return (*silent, *_seated(job)) if _broken(job) else silent


def _broken(job: Job) -> bool:
    """Somebody's workers wait because they lost a connection in this epoch, or have ended because of it."""
    return job.end is None and (bool(job.open_doubts()) or any(losses.echoes(job, i) for i in job.troubles))
