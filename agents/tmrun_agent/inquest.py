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
from tmrun.core.model import Host, Member, Seat
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
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def tend(self, job: Job, *, doubt: bool, leads: bool) -> None:
        """Once a turn. ``doubt``: our own workers wait for an explanation."""
        suspects = _seated(job) if leads and _unexplained(job) else _leader(job) if doubt and not leads else ()
        suspects = tuple(h for h in suspects if h != self.me.host)
        if not suspects or time.monotonic() - self._asked < ASK_EVERY_S or not self._busy.acquire(blocking=False):
            return
        self._asked = time.monotonic()
        threading.Thread(target=self._run, args=(suspects,), name="inquest", daemon=True).start()

    def _run(self, suspects: tuple[Host, ...]) -> None:
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(self._ask, suspects))
        finally:
            self._busy.release()

    def _ask(self, host: Host) -> None:
        try:
            entry = self.store.get(self.keys.member(host))
            member = codec.decode(Member, entry.value) if entry is not None else None
            proof = witness.ask(member.witness) if member is not None and member.witness else witness.Proof.NONE
            if member is None or not proof:
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
