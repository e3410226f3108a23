"""Background sources of what the agent learns; each only puts into the inbox.

May not know: what follows from it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tmrun.core.txn import KeyValue
from tmrun.store.api import Changed, WatchEvent


@dataclass(frozen=True, slots=True)
class StoreMoved:
    """Something under the watched prefix changed; the mirror has it."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The store said that our lease is gone."""

    lease: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A signal asks the agent to end."""

    number: int


class Mirror:
    """The watched keys as last heard. Fed by the watch thread, read by the loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, KeyValue] = {}
        self._revision = 0

    def feed(self, event: WatchEvent) -> None:
        """Fold one event; older news than what is known is dropped."""
        with self._lock:
            if isinstance(event, Changed):
                self._change(event)
            elif event.listing.revision >= self._revision:
                self._entries = {kv.key: kv for kv in event.listing.entries}
                self._revision = event.listing.revision

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
