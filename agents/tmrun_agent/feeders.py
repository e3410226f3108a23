"""Background sources of what the agent learns; each only puts into the inbox.

May not know: what follows from it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tmrun.core.txn import Delete, KeyValue, Op, Put
from tmrun.store.api import Changed, WatchEvent


@dataclass(frozen=True, slots=True)
class StoreMoved:
    """Something under the watched prefix changed; the mirror has it."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The store said that our lease is gone."""

    lease: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The workers are being killed, because this agent may be taken for dead."""

    reason: str


@dataclass(frozen=True, slots=True)
class Parked:
    """The workers are told to stop and wait, for the same reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A signal asks the agent to end."""

    number: int


class Mirror:
    """The keys below one prefix as last heard. Fed by the watch thread, read by the loop."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._entries: dict[str, KeyValue] = {}
        self._revision = 0
        self._loaded = False

    def feed(self, event: WatchEvent) -> None:
        """Fold one event; older news than what is known is dropped."""
        with self._lock:
            if isinstance(event, Changed):
                self._change(event)
            elif event.listing.revision >= self._revision:
                self._entries = {kv.key: kv for kv in event.listing.entries}
                self._revision = event.listing.revision
                self._loaded = True
            self._lock.notify_all()

    @property
    def loaded(self) -> bool:
        """A listing was heard, so that a key that is missing does not exist."""
        return self._loaded

    def wait_for(self, ops: Sequence[Op], revision: int, timeout_s: float) -> bool:
        """True once the watch has told all that a transaction with ``ops`` did at ``revision``; False when it did not in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._revision > revision or all(self._has(op, revision) for op in ops), timeout_s)

    def _has(self, op: Op, revision: int) -> bool:
        if isinstance(op, Put):
            return op.key in self._entries and self._entries[op.key].mod_revision >= revision
        if isinstance(op, Delete):
            return op.key not in self._entries or self._entries[op.key].mod_revision > revision
        return not any(kv.key.startswith(op.prefix) and kv.mod_revision <= revision for kv in self._entries.values())

    def _change(self, event: Changed) -> None:
        if event.revision < self._revision:
            return
        self._revision = event.revision
        if event.value is None:
            self._entries.pop(event.key, None)
        else:
            self._entries[event.key] = event.value

    def snapshot(self) -> tuple[KeyValue, ...]:
        """The keys as of now."""
        with self._lock:
            return tuple(self._entries.values())
