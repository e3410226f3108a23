"""An exact model of etcd, as far as ``store.api`` shows it, for tests and simulations: no threads, virtual time.

One ``MemoryWorld`` is the cluster. Each ``world.client()`` is one process's store, which a test may partition, or make
lose the answer to its next commit. Nothing happens by itself: time passes in ``world.advance``, and watch events wait in
their watch until ``world.pump`` (or go out at once in a world with ``auto=True``, once the call that caused them is done).
May not know: the key layout, the protocol, real time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tmrun.core.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable
from tmrun.core.txn import (
    MAX_TXN_OPS,
    NO_LEASE,
    Absent,
    CreatedAt,
    Delete,
    Guard,
    KeyValue,
    Listing,
    ModifiedAt,
    Op,
    Put,
    Txn,
    TxnResult,
    ValueIs,
)
from tmrun.store.api import Changed, Resync, WatchEvent

MAX_REQUEST_BYTES = 1536 * 1024
RELIST_S = 30.0
RENEWALS_A_TTL = 5
_FOREVER = float("inf")


class Fate(Enum):
    """What becomes of a client's next commit."""

    ANSWERED = "as usual"
    APPLIED_UNANSWERED = "applied, but the caller gets OutcomeUnknown"
    LOST = "not applied, and the caller gets OutcomeUnknown"


class VirtualClock:
    """Time that only ``MemoryWorld.advance`` moves. Call it to read it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds, from no particular start."""
        return self.now


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    expires: float
    keys: set[str] = field(default_factory=set)


class MemoryWorld:
    """The cluster: keys, leases, time, and who watches what."""

    def __init__(self, clock: VirtualClock | None = None, *, auto: bool = True) -> None:
        self.clock = clock or VirtualClock()
        self.auto = auto
        self.revision = 1  # as a fresh etcd's
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0
        self._clients: list[MemoryStore] = []
        self._delivering = False

    def client(self, name: str = "client") -> MemoryStore:
        """Another process's view."""
        return MemoryStore(self, name)

    # --- time

    def advance(self, seconds: float) -> None:
        """Let time pass: renewals, lease expiry and re-listings happen in the order of their times."""
        end = self.clock.now + seconds
        while True:
            due = min([*self._due_times(), _FOREVER])
            if due > end:
                break
            self.clock.now = max(self.clock.now, due)
            # At a tie the renewal loses: that is the order which a protocol has to survive.
            self._expire()
            for client in tuple(self._clients):
                client._tick()
            self._settle()
        self.clock.now = end

    def _due_times(self) -> Iterable[float]:
        yield from (lease.expires for lease in self._leases.values())
        for client in self._clients:
            yield from client._due_times()

    def _expire(self) -> None:
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.expires <= self.clock.now]:
            self.revoke(lease_id)

    # --- watches

    def pump(self, limit: int | None = None) -> int:
        """Deliver waiting watch events, those caused by the deliveries too (at most ``limit``); returns how many."""
        count = 0
        while limit is None or count < limit:
            watch = next((watch for watch in self.watches() if watch.deliverable), None)
            if watch is None:
                break
            watch.deliver()
            count += 1
        return count

    def watches(self) -> list[MemoryWatch]:
        """All open watches of all clients; a test may deliver, duplicate or resync each by itself."""
        return [watch for client in self._clients for watch in client._watches]

    def compact(self) -> None:
        """Forget history: every watch that has not seen all of it must list anew."""
        for watch in self.watches():
            if watch.pending:
                watch.resync()
        self._settle()

    def _settle(self) -> None:
        """In an auto world, deliver; a callback that calls the store does not nest, so order is kept."""
        if not self.auto or self._delivering:
            return
        self._delivering = True
        try:
            self.pump()
        finally:
            self._delivering = False

    def _notify(self, changes: list[Changed]) -> None:
        for watch in self.watches():
            watch._take(changes)

    # --- what etcd does with a request

    def get(self, key: str) -> KeyValue | None:
        """The key now."""
        return self._keys.get(key)

    def listing(self, prefix: str) -> Listing:
        """The keys now, in byte order as etcd's (which for UTF-8 is code point order)."""
        return Listing(self.revision, tuple(self._keys[key] for key in sorted(self._keys) if key.startswith(prefix)))

    def commit(self, txn: Txn) -> TxnResult:
        """All or nothing, at one revision."""
        _check_request(txn)
        if not all(self._holds(guard) for guard in txn.guards):
            return TxnResult(False, self.revision)
        for op in txn.ops:  # before anything is applied: a dead lease fails the whole transaction
            if isinstance(op, Put) and op.lease != NO_LEASE and op.lease not in self._leases:
                raise LeaseGone(f"the lease {op.lease} in transaction {txn.name!r} has expired or was revoked; take a new one")
        changes = [change for op in txn.ops for change in self._apply(op, self.revision + 1)]
        if changes:  # deleting nothing makes no revision
            self.revision += 1
            self._notify(changes)
        return TxnResult(True, self.revision)

    def _holds(self, guard: Guard) -> bool:
        have = self._keys.get(guard.key)
        if isinstance(guard, Absent):
            return have is None
        if isinstance(guard, CreatedAt):
            return (have.create_revision if have else 0) == guard.create_revision
        if isinstance(guard, ModifiedAt):
            return (have.mod_revision if have else 0) == guard.mod_revision
        assert isinstance(guard, ValueIs), guard
        return have is not None and have.value == guard.value

    def _apply(self, op: Op, revision: int) -> list[Changed]:
        if isinstance(op, Put):
            return [self._put(op, revision)]
        if isinstance(op, Delete):
            return self._delete([op.key], revision)
        return self._delete([key for key in sorted(self._keys) if key.startswith(op.prefix)], revision)

    def _put(self, op: Put, revision: int) -> Changed:
        old = self._keys.get(op.key)
        if old is None:
            new = KeyValue(op.key, op.value, revision, revision, 1, op.lease)
        else:
            self._detach(old)
            new = replace(old, value=op.value, mod_revision=revision, version=old.version + 1, lease=op.lease)
        self._keys[op.key] = new
        if op.lease != NO_LEASE:
            self._leases[op.lease].keys.add(op.key)
        return Changed(op.key, new, revision)

    def _delete(self, keys: Iterable[str], revision: int) -> list[Changed]:
        present = [key for key in keys if key in self._keys]
        for key in present:
            self._detach(self._keys.pop(key))
        return [Changed(key, None, revision) for key in present]

    def _detach(self, kv: KeyValue) -> None:
        if kv.lease in self._leases:
            self._leases[kv.lease].keys.discard(kv.key)

    def grant(self, ttl_s: float) -> int:
        """A new lease."""
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl_s, self.clock.now + ttl_s)
        return self._last_lease

    def renew(self, lease_id: int) -> float:
        """The lease's full TTL again, or 0 when it is gone."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return 0.0
        lease.expires = self.clock.now + lease.ttl_s
        return lease.ttl_s

    def revoke(self, lease_id: int) -> None:
        """End a lease: its keys go at one revision."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.keys:
            self.revision += 1
            self._notify(self._delete(sorted(lease.keys), self.revision))


def _check_request(txn: Txn) -> None:
    """What etcd refuses before it looks at any guard."""
    if max(len(txn.guards), len(txn.ops)) > MAX_TXN_OPS:
        raise StoreError(f"transaction {txn.name!r} has more than {MAX_TXN_OPS} guards or operations: split it")
    puts = [op.key for op in txn.ops if isinstance(op, Put)]
    deletes = [op.key for op in txn.ops if isinstance(op, Delete)]
    prefixes = tuple(op.prefix for op in txn.ops if not isinstance(op, Put | Delete))
    if len(set(puts)) < len(puts) or set(puts) & set(deletes) or any(key.startswith(prefixes) for key in puts):
        raise StoreError(f"transaction {txn.name!r} touches a key twice (duplicate key given in txn request)")
    size = sum(len(op.key.encode()) + len(op.value.encode()) for op in txn.ops if isinstance(op, Put))
    if size > MAX_REQUEST_BYTES:
        raise StoreError(f"transaction {txn.name!r} is too large ({size} bytes): split it")


class MemoryStore:
    """One client of a world; implements ``tmrun.store.api.Store``."""

    def __init__(self, world: MemoryWorld, name: str = "client") -> None:
        self.world = world
        self.name = name
        world._clients.append(self)
        self._partitioned = False
        self._healed_at = _FOREVER
        self._closed = False
        self._fates: deque[Fate] = deque()
        self._watches: list[MemoryWatch] = []
        self._kept: list[MemoryKeepAlive] = []
        self._granted_at: dict[int, float] = {}

    # --- faults

    @property
    def partitioned(self) -> bool:
        """While true, calls raise StoreUnavailable, leases are not renewed and watch events wait."""
        return self._partitioned

    @partitioned.setter
    def partitioned(self, cut: bool) -> None:
        self._partitioned = cut
        if not cut:
            self._tick()
            self.world._settle()

    def cut_off(self, seconds: float) -> None:
        """See ``Store``."""
        self._healed_at = self.world.clock.now + seconds
        self.partitioned = True

    def next_commits(self, *fates: Fate) -> None:
        """Decide the fates of the next commits of this client, in order."""
        self._fates.extend(fates)

    def crash(self) -> None:
        """The process is gone: no more renewals or callbacks; its leases run out by themselves."""
        self.close()

    # --- Store

    def get(self, key: str) -> KeyValue | None:
        """See ``Store``."""
        self._reach()
        return self.world.get(key)

    def list(self, prefix: str) -> Listing:
        """See ``Store``."""
        self._reach()
        return self.world.listing(prefix)

    def commit(self, txn: Txn) -> TxnResult:
        """See ``Store``."""
        self._reach()
        fate = self._fates.popleft() if self._fates else Fate.ANSWERED
        unknown = OutcomeUnknown(f"no answer to transaction {txn.name!r}; it may have been applied: re-read before retrying")
        if fate is Fate.LOST:
            raise unknown
        try:
            result = self.world.commit(txn)
        except StoreError:
            if fate is Fate.APPLIED_UNANSWERED:  # the refusal is what gets lost
                raise unknown from None
            raise
        self.world._settle()
        if fate is Fate.APPLIED_UNANSWERED:
            raise unknown
        return result

    def list_all(self, prefixes: Sequence[str]) -> Listing:
        """See ``Store``."""
        self._reach()
        return Listing(self.world.revision, tuple(kv for prefix in prefixes for kv in self.world.listing(prefix).entries))

    def put(self, key: str, value: str, lease: int = 0) -> None:
        """See ``Store``."""
        self._reach()
        self.world.commit(Txn((), (Put(key, value, lease),), f"write of {key}"))
        self.world._settle()

    def grant(self, ttl_s: int) -> int:
        """See ``Store``."""
        self._reach()
        lease = self.world.grant(ttl_s)
        self._granted_at[lease] = self.world.clock.now
        return lease

    def revoke(self, lease: int) -> None:
        """See ``Store``."""
        self._reach()
        self.world.revoke(lease)
        self.world._settle()

    def keep_alive(self, lease: int, ttl_s: int, on_lost: Callable[[], None]) -> MemoryKeepAlive:
        """See ``Store``."""
        kept = MemoryKeepAlive(self, lease, ttl_s, on_lost, self._granted_at.pop(lease, -_FOREVER))
        self._kept.append(kept)
        kept._tick()
        return kept

    def watch(self, prefix: str, on_event: Callable[[WatchEvent], None]) -> MemoryWatch:
        """See ``Store``."""
        watch = MemoryWatch(self, prefix, on_event)
        self._watches.append(watch)
        self.world._settle()
        return watch

    def watch_all(self, feeds: Mapping[str, Callable[[WatchEvent], None]]) -> MemoryWatches:
        """See ``Store``."""
        return MemoryWatches([self.watch(prefix, on_event) for prefix, on_event in feeds.items()])

    def close(self) -> None:
        """See ``Store``."""
        self._closed = True
        self._watches.clear()
        self._kept.clear()

    def _reach(self) -> None:
        if self._closed:
            raise StoreUnavailable("this connection to the store was closed; open a new store")
        if self._partitioned:
            raise StoreUnavailable(f"no answer from the store ({self.name} is partitioned)")

    def _tick(self) -> None:
        if self._healed_at <= self.world.clock.now:
            self._healed_at = _FOREVER
            self.partitioned = False
        for kept in tuple(self._kept):
            kept._tick()
        for watch in self._watches:
            watch._tick()

    def _due_times(self) -> Iterable[float]:
        yield self._healed_at
        if not self._partitioned:  # else nothing of it is due before it is healed
            yield from (kept._due for kept in self._kept)
            yield from (watch._relist_at for watch in self._watches)


class MemoryKeepAlive:
    """Renews in ``advance``."""

    def __init__(self, store: MemoryStore, lease: int, ttl_s: float, on_lost: Callable[[], None], granted_at: float) -> None:
        self._store, self._lease, self._ttl_s, self._on_lost = store, lease, ttl_s, on_lost
        self._due = store.world.clock.now
        self.last_renewed = granted_at
        """Time of the last acknowledged renewal; until then, of the grant; never, for another client's lease."""
        self.answer_s = 0.0
        """Nobody waits here."""
        self.lost = False
        """The store said that the lease is gone."""

    def close(self) -> None:
        """Stop renewing."""
        if self in self._store._kept:
            self._store._kept.remove(self)

    def _tick(self) -> None:
        world = self._store.world
        if self._store.partitioned or world.clock.now < self._due:
            return
        self._due = world.clock.now + self._ttl_s / RENEWALS_A_TTL
        if world.renew(self._lease) > 0:
            self.last_renewed = world.clock.now
            return
        self.close()
        self.lost = True
        self._on_lost()


class MemoryWatch:
    """A queue of events on their way; a test may deliver them one by one, twice, or replace them by a Resync."""

    def __init__(self, store: MemoryStore, prefix: str, on_event: Callable[[WatchEvent], None]) -> None:
        self._store, self._prefix, self._on_event = store, prefix, on_event
        self._waiting: deque[Changed] = deque()
        self._last: WatchEvent | None = None
        self._must_list = True
        self._relist_at = _FOREVER

    @property
    def pending(self) -> int:
        """How many events wait, a due Resync included."""
        return len(self._waiting) + self._must_list

    @property
    def deliverable(self) -> bool:
        """Something waits and its client can be reached."""
        return bool(self.pending) and not self._store.partitioned

    def deliver(self) -> None:
        """Hand the next event over."""
        assert self.deliverable, self._prefix
        if self._must_list:
            self._must_list = False
            self._relist_at = self._store.world.clock.now + RELIST_S
            self._waiting.clear()  # the listing holds them all
            self._last = Resync(self._store.world.listing(self._prefix))
        else:
            self._last = self._waiting.popleft()
        self._on_event(self._last)

    def duplicate(self) -> None:
        """Hand the last event over again, as a resumed stream may."""
        if self._last is not None:
            self._on_event(self._last)

    def resync(self) -> None:
        """Make the next delivery a Resync, as after a compaction."""
        self._must_list = True
        self._relist_at = _FOREVER  # until that is delivered

    def close(self) -> None:
        """Stop delivering."""
        if self in self._store._watches:
            self._store._watches.remove(self)

    def _take(self, changes: Iterable[Changed]) -> None:
        self._waiting.extend(change for change in changes if change.key.startswith(self._prefix))

    def _tick(self) -> None:
        if not self._store.partitioned and self._store.world.clock.now >= self._relist_at:
            self.resync()


class MemoryWatches:
    """Several that end together; each is delivered by itself."""

    def __init__(self, watches: Sequence[MemoryWatch]) -> None:
        self._watches = watches

    def close(self) -> None:
        """Stop delivering."""
        for watch in self._watches:
            watch.close()
