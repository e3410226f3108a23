"""What an agent watches of the protocol state: what is told to all, what is its own, and, while it coordinates, everything.

    common + node/{me} + slot/{s} for each s that concerns it        an ordinary agent: about 20 keys, however large the job is
    ctl                                                              the coordinator; in its place, once it is loaded, at one revision

The parts of an ordinary agent may be of different revisions. That costs a transaction that fails and is tried anew, never safety: the
guards of each transaction name every key that it was decided on. May not know: what the keys mean, which slots concern whom.
"""

from __future__ import annotations

from collections.abc import Callable

from tmrun.core.keys import Keys
from tmrun.core.txn import DeletePrefix, KeyValue, Op, Txn
from tmrun.store.api import Resync, Store, Watch, WatchEvent
from tmrun_agent.feeders import Mirror


class Views:
    """Used by the agent's one thread; ``moved`` is called from the watches' threads."""

    def __init__(self, store: Store, keys: Keys, host: str, moved: Callable[[], None]) -> None:
        self._store, self._keys, self._moved = store, keys, moved
        self._views: dict[str, _View] = {}
        self._own = (keys.common, keys.node(host))
        self.want(frozenset(), everything=False)

    def want(self, slots: frozenset[int], *, everything: bool) -> bool:
        """Watch this and nothing else; True when that is a change."""
        wanted = {*self._own, *(self._keys.slot(i) for i in slots)} | ({self._keys.ctl} if everything else set())
        if wanted == self._views.keys():
            return False
        for prefix in self._views.keys() - wanted:
            self._views.pop(prefix).watch.close()
        for prefix in wanted - self._views.keys():
            self._views[prefix] = _View(self._store, prefix, self._moved)
        return True

    @property
    def sees_all(self) -> bool:
        """Everything is watched, and has been heard of."""
        view = self._views.get(self._keys.ctl)
        return view is not None and view.mirror.loaded

    @property
    def loaded(self) -> bool:
        """All that is watched of an ordinary agent has been heard of: what is missing then does not exist."""
        return self.sees_all or all(v.mirror.loaded for p, v in self._views.items() if p != self._keys.ctl)

    def snapshot(self) -> tuple[KeyValue, ...]:
        """The keys as last heard."""
        return tuple(kv for view in self._in_use() for kv in view.mirror.snapshot())

    def refresh(self) -> None:
        """Read all that is watched anew. Raises StoreError."""
        for view in self._in_use():
            view.mirror.feed(Resync(self._store.list(view.prefix)))

    def wait_for(self, txn: Txn, revision: int, timeout_s: float) -> bool:
        """True once the watches have told all that ``txn`` did at ``revision``; False when they did not in time."""
        return all(v.mirror.wait_for([op for op in txn.ops if v.sees(op)], revision, timeout_s) for v in self._in_use())

    def _in_use(self) -> list[_View]:
        if self.sees_all:
            return [self._views[self._keys.ctl]]
        return [view for prefix, view in self._views.items() if prefix != self._keys.ctl]


class _View:
    """One watched prefix."""

    def __init__(self, store: Store, prefix: str, moved: Callable[[], None]) -> None:
        self.prefix, self.mirror = prefix, Mirror()

        def feed(event: WatchEvent) -> None:
            self.mirror.feed(event)
            moved()

        self.watch: Watch = store.watch(prefix, feed)

    def sees(self, op: Op) -> bool:
        return (op.prefix if isinstance(op, DeletePrefix) else op.key).startswith(self.prefix)
