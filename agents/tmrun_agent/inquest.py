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
_AT_ONCE = 32


@dataclass
class Inquest:
    """``tell``: one line for the story, from the asking thread."""

    store: Store
    keys: Keys
    me: Seat
    tell: Callable[[str], None]
    _asked: float = 0.0
    _met: set[tuple[Host, Incarnation]] = field(default_factory=set)
    _reached: set[str] = field(default_factory=set)
    """Witnesses that could be reached while their launch lived."""
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def tend(self, job: Job, *, doubt: bool, leads: bool) -> None:
        """Once a turn. ``doubt``: our own workers wait for an explanation."""
        suspects = _seated(job) if leads and _unexplained(job) else _leader(job) if doubt and not leads else ()
        suspects = tuple(h for h in suspects if h != self.me.host)
        strangers = () if suspects else self._strangers(job, leads=leads)
        if strangers and self._busy.acquire(blocking=False):
            self._met |= strangers
            hosts = tuple(host for host, _ in strangers)
            threading.Thread(target=self._run, args=(hosts, self._meet), name="inquest-meet", daemon=True).start()
        if not suspects or time.monotonic() - self._asked < ASK_EVERY_S or not self._busy.acquire(blocking=False):
            return
        self._asked = time.monotonic()
        threading.Thread(target=self._run, args=(suspects, self._ask), name="inquest", daemon=True).start()

    def _strangers(self, job: Job, *, leads: bool) -> set[tuple[Host, Incarnation]]:
        """Those whom we may have to ask about one day, and have never reached."""
        if job.end is not None:
            return set()
        leader = {(job.leader.value.host, job.leader.value.incarnation)} if job.leader is not None else set()
        seated = {(s.host, s.incarnation) for s in job.map.seats if job.alive(s)} if job.map else set()
        return {who for who in (seated if leads else leader) if who[0] != self.me.host} - self._met

    def _run(self, hosts: tuple[Host, ...], each: Callable[[Host], None]) -> None:
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(each, hosts))
        finally:
            self._busy.release()

    def _member(self, host: Host) -> Member | None:
        entry = self.store.get(self.keys.member(host))
        return codec.decode(Member, entry.value) if entry is not None else None

    def _meet(self, host: Host) -> None:
        try:
            member = self._member(host)
        except StoreError:
            return
        if member is not None and member.witness and witness.reached(member.witness):
            self._reached.add(member.witness)

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
