"""When connections break and nobody has explained it yet: ask the witnesses of those who may be dead, and bury who is.

A broken connection is a hint, never a proof; ``witness`` has what proves a death.
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
from tmrun.core import codec
from tmrun.core.errors import StoreError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import Host, Incarnation, Member, Seat
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
    _met: set[tuple[Host, Incarnation]] = field(default_factory=set)
    """Those who could be reached once, or have no witness."""
    _meet_at: dict[tuple[Host, Incarnation], float] = field(default_factory=dict)
    """When the others are tried again."""
    _reached: set[str] = field(default_factory=set)
    """Witnesses that could be reached while their launch lived."""
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _meeting: threading.Lock = field(default_factory=threading.Lock)
    """Apart, so that who cannot be reached never keeps us from asking."""

    def tend(self, job: Job, *, doubt: bool, leads: bool) -> None:
        """Once a turn. ``doubt``: our own workers wait for an explanation."""
        suspects = _seated(job) if leads and _unexplained(job) else _leader(job) if doubt and not leads else ()
        suspects = tuple(h for h in suspects if h != self.me.host)
        strangers = () if suspects else self._strangers(job, leads=leads)
        if strangers and self._meeting.acquire(blocking=False):
            self._meet_at |= dict.fromkeys(strangers, self.clock() + MEET_AGAIN_S)
            hosts = tuple(host for host, _ in strangers)
            threading.Thread(target=self._run, args=(hosts, self._meet, self._meeting), name="inquest-meet", daemon=True).start()
        if not suspects or self.clock() - self._asked < ASK_EVERY_S or not self._busy.acquire(blocking=False):
            return
        self._asked = self.clock()
        threading.Thread(target=self._run, args=(suspects, self._ask, self._busy), name="inquest", daemon=True).start()

    def _strangers(self, job: Job, *, leads: bool) -> set[tuple[Host, Incarnation]]:
        """Those whom we may have to ask about one day, have never reached, and have not tried just now."""
        if job.end is not None:
            return set()
        leader = {(job.leader.value.host, job.leader.value.incarnation)} if job.leader is not None else set()
        seated = {(s.host, s.incarnation) for s in job.map.seats if job.alive(s)} if job.map else set()
        now = self.clock()
        unmet = (who for who in (seated if leads else leader) if who[0] != self.me.host and who not in self._met)
        return {who for who in unmet if self._meet_at.get(who, now) <= now}

    def _run(self, hosts: tuple[Host, ...], each: Callable[[Host], None], busy: threading.Lock) -> None:
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(each, hosts))
        finally:
            busy.release()

    def _member(self, host: Host) -> Member | None:
        entry = self.store.get(self.keys.member(host))
        return codec.decode(Member, entry.value) if entry is not None else None

    def _meet(self, host: Host) -> None:
        try:
            member = self._member(host)
        except StoreError:
            return
        if member is None:
            return
        if member.witness and witness.reached(member.witness):
            self._reached.add(member.witness)
        if not member.witness or member.witness in self._reached:
            self._met.add((host, member.incarnation))

    def _ask(self, host: Host) -> None:
        try:
            member = self._member(host)
            proof = witness.ask(member.witness) if member is not None and member.witness else witness.Proof.NONE
            if member is None or not proof or (proof is witness.Proof.CLOSED and member.witness not in self._reached):
                return
            bury(self.store, self.keys, host, member.incarnation)
        except StoreError:
            return  # asked again
        self.tell(f"{host} is gone: {proof.value}")


def _seated(job: Job) -> tuple[Host, ...]:
    return tuple(s.host for s in job.map.seats if job.alive(s)) if job.map else ()


def _leader(job: Job) -> tuple[Host, ...]:
    return (job.leader.value.host,) if job.leader is not None else ()


def _unexplained(job: Job) -> bool:
    """Somebody's workers lost a connection in this epoch."""
    return job.end is None and any(d.epoch == job.epoch for d in job.doubts.values())
