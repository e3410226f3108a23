"""The coordinator's eye on slow nodes: reads how long each node computes, tells who falls behind, and drains it if the job wants that.

Only for people, and at most one drain at a time onto a standby that is warm; what counts as slow is decided in ``core.straggler``.
May not know: how times are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tmrun.core import codec, planner, progress, straggler, transactions
from tmrun.core.codec import CodecError
from tmrun.core.membership import Job
from tmrun.core.model import Host, Operation, Progress, Verb
from tmrun.core.straggler import Slow
from tmrun.core.txn import Txn
from tmrun.store.api import Store

LOOK_EVERY_S = 6.0


@dataclass
class Slowness:
    """``tell``: one line for the story. Used by the agent's one thread."""

    store: Store
    tell: Callable[[str], None]
    submit: Callable[[Txn], bool]
    _known: Slow = field(default_factory=Slow)
    _last: dict[Host, float] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self, job: Job) -> None:
        """Once in a while, while this agent coordinates. Raises StoreError."""
        assert job.spec is not None
        if job.spec.straggler == "off" or job.map is None or time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        busy = self._read(job)
        if busy == self._last:
            return  # nothing new was measured
        before, self._last = self._known, busy
        self._known = straggler.look(before, busy)
        for host in sorted(self._known.slow.keys() - before.slow.keys()):
            self.tell(f"{host} is slow: it computes {self._known.slow[host]:.2f} times as long as the others")
        if job.spec.straggler == "drain":
            self._drain(job, self._known.slow)
        for host in sorted(before.slow.keys() - self._known.slow.keys()):
            self.tell(f"{host} is no longer slow")

    def _read(self, job: Job) -> dict[Host, float]:
        found = []
        for entry in self.store.list(job.keys.progresses).entries:
            try:
                found.append(codec.decode(Progress, entry.value))
            except CodecError:
                continue
        return {host: p.busy_s for host, p in progress.of_seats(job, found).items() if p.busy_s > 0}

    def _drain(self, job: Job, slow: Mapping[Host, float]) -> None:
        """The slowest of them. Asked for in every look: when a node was found slow there may have been no standby."""
        if job.open_ops() or not slow or not planner.standbys(job):
            return
        host = max(slow, key=lambda h: slow[h])
        if not job.draining(host):
            why = f"slow: computes {slow[host]:.2f} times as long as the others"
            self.submit(transactions.request(job, Operation(f"slow-{job.epoch}-{host}", Verb.DRAIN, (host,), why)))
