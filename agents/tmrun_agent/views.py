"""What an agent watches of the protocol state: what is told to all, what is its own, and, while it coordinates, everything.

    common + node/{me} + slot/{s} for each s that concerns it        an ordinary agent: about 20 keys, however large the job is
    ctl                                                              the coordinator; in its place, once it is loaded, at one revision

The parts of an ordinary agent may be of different revisions. That costs a transaction that fails and is tried anew, never safety: the
guards of each transaction name every key that it was decided on. To end workers is no transaction and cannot be undone: it is decided on
``read``. May not know: what the keys mean, which slots concern whom.
"""

from __future__ import annotations

from collections.abc import Callable

from tmrun.core.keys import Keys
from tmrun.core.txn import DeletePrefix, KeyValue, Listing, Op, Txn
from tmrun.store.api import Resync, Store, Watch, WatchEvent
from tmrun_agent.feeders import Mirror


class Views:
    """Used by the agent's one thread; ``moved`` is called from the watches' threads."""

    def __init__(self, store: Store, keys: Keys, host: str, moved: Callable[[], None]) -> None:
        self._store, self._keys, self._moved = store, keys, moved
        self._own = (keys.common, keys.node(host))
        self._parts: dict[str, Mirror] = {}
        self._all: Mirror | None = None
        self._part_watch: Watch | None = None
        self._all_watch: Watch | None = None
        self.want(frozenset(), everything=False)

    def want(self, slots: frozenset[int], *, everything: bool) -> bool:
        """Watch this and nothing else; True when that is a change."""
        wanted = [*self._own, *(self._keys.slot(i) for i in sorted(slots))]
        changed = wanted != list(self._parts) or everything != (self._all is not None)
        if wanted != list(self._parts):
            self._part_watch = self._replace(self._part_watch, {p: self._parts.get(p) or Mirror() for p in wanted})
        if everything and self._all is None:
            self._all = Mirror()
            self._all_watch = self._store.watch(self._keys.ctl, self._feed(self._all))
        elif self._all_watch is not None and not everything:
            self._all_watch.close()
            self._all = self._all_watch = None
        return changed

    def _replace(self, old: Watch | None, parts: dict[str, Mirror]) -> Watch:
        """One stream for all parts; what was heard of those that stay is kept, and the new stream lists them again."""
        if old is not None:
            old.close()
        self._parts = parts
        return self._store.watch_all({prefix: self._feed(mirror) for prefix, mirror in parts.items()})

    def _feed(self, mirror: Mirror) -> Callable[[WatchEvent], None]:
        def feed(event: WatchEvent) -> None:
            mirror.feed(event)
            self._moved()

        return feed

    @property
    def sees_all(self) -> bool:
        """Everything is watched, and has been heard of."""
        return self._all is not None and self._all.loaded

    @property
    def loaded(self) -> bool:
        """All that is watched of an ordinary agent has been heard of: what is missing then does not exist."""
        return self.sees_all or all(mirror.loaded for mirror in self._parts.values())

    def snapshot(self) -> tuple[KeyValue, ...]:
        """The keys as last heard."""
        return tuple(kv for mirror in self._in_use().values() for kv in mirror.snapshot())

    def refresh(self) -> None:
        """Read all that is watched anew. Raises StoreError."""
        listing = self._store.list_all(list(self._in_use()))
        for prefix, mirror in self._in_use().items():
            mirror.feed(Resync(Listing(listing.revision, tuple(kv for kv in listing.entries if kv.key.startswith(prefix)))))

    def read(self) -> tuple[KeyValue, ...]:
        """What ``snapshot`` would be if nothing were on its way: from the store, as of one revision. Raises StoreError."""
        return self._store.list_all(list(self._in_use())).entries

    def wait_for(self, txn: Txn, revision: int, timeout_s: float) -> bool:
        """True once the watches have told all that ``txn`` did at ``revision``; False when they did not in time."""
        told = (m.wait_for([op for op in txn.ops if _touched(op).startswith(p)], revision, timeout_s) for p, m in self._in_use().items())
        return all(told)

    def _in_use(self) -> dict[str, Mirror]:
        return {self._keys.ctl: self._all} if self._all is not None and self._all.loaded else self._parts


def _touched(op: Op) -> str:
    return op.prefix if isinstance(op, DeletePrefix) else op.key
