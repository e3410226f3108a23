"""The store on a real etcd.

Reads, puts, grants and revokes are retried on every member until the deadline; a commit is sent once.
May not know: the key layout, the protocol, how a member is started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tmrun.core.errors import LeaseGone
from tmrun.core.txn import KeyValue, Listing, Txn, TxnResult
from tmrun.store.api import WatchEvent
from tmrun.store.channels import DEADLINE_S, TRY_S, Channels
from tmrun.store.endpoints import Endpoints, TlsFiles, endpoints
from tmrun.store.etcd_codec import key_value, listing, listings, range_request, ranges_request, raw, txn_request
from tmrun.store.etcd_lease import EtcdKeepAlive
from tmrun.store.etcd_stubs import rpc
from tmrun.store.etcd_watch import RELIST_S, EtcdWatch

__all__ = ["Endpoints", "EtcdStore", "TlsFiles", "boottime", "endpoints"]


def boottime() -> float:
    """Seconds that go on while the machine sleeps, as a lease's do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EtcdStore:
    """Implements ``tmrun.store.api.Store``; thread-safe. Connects at the first call."""

    def __init__(
        self,
        where: str | Sequence[str] | Endpoints,
        user: str | None = None,
        password: str | None = None,
        tls: TlsFiles | None = None,
        clock: Callable[[], float] = boottime,
        deadline_s: float = DEADLINE_S,
        try_s: float = TRY_S,
        relist_s: float = RELIST_S,
    ) -> None:
        parsed = where if isinstance(where, Endpoints) else endpoints(where)
        self._channels = Channels(parsed, user, password, tls, deadline_s, try_s)
        self._clock = clock
        self._relist_s = relist_s
        self._lock = threading.Lock()
        self._granted_at: dict[int, float] = {}
        self._running: list[EtcdWatch | EtcdKeepAlive] = []

    def get(self, key: str) -> KeyValue | None:
        """See ``Store``."""
        reply = self._channels.call(lambda e: e.kv.Range, rpc.RangeRequest(key=raw(key)), name=f"read of {key}")
        return key_value(reply.kvs[0]) if reply.kvs else None

    def list(self, prefix: str) -> Listing:
        """See ``Store``."""
        return self._list(prefix, None)

    def _list(self, prefix: str, deadline_s: float | None) -> Listing:
        return listing(self._channels.call(lambda e: e.kv.Range, range_request(prefix), deadline_s=deadline_s, name=f"read of {prefix}*"))

    def list_all(self, prefixes: Sequence[str]) -> Listing:
        """See ``Store``."""
        reply = self._channels.call(lambda e: e.kv.Txn, ranges_request(prefixes), name=f"read of {len(prefixes)} prefixes")
        return listings(reply)

    def commit(self, txn: Txn) -> TxnResult:
        """See ``Store``."""
        reply = self._channels.call(lambda e: e.kv.Txn, txn_request(txn), resend=False, probe=_probe(txn), name=f"transaction {txn.name!r}")
        return TxnResult(reply.succeeded, reply.header.revision)

    def put(self, key: str, value: str, lease: int = 0) -> None:
        """See ``Store``."""
        self._channels.call(lambda e: e.kv.Put, rpc.PutRequest(key=raw(key), value=raw(value), lease=lease), name=f"write of {key}")

    def grant(self, ttl_s: int) -> int:
        """See ``Store``; a retry may leave a second lease behind, which expires unused."""
        sent = self._clock()
        lease = int(self._channels.call(lambda e: e.lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=ttl_s), name="lease request").ID)
        with self._lock:
            self._granted_at[lease] = sent
        return lease

    def revoke(self, lease: int) -> None:
        """See ``Store``."""
        with self._lock:
            self._granted_at.pop(lease, None)
        try:
            self._channels.call(lambda e: e.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease), name="lease revocation")
        except LeaseGone:
            pass

    def keep_alive(self, lease: int, ttl_s: int, on_lost: Callable[[], None]) -> EtcdKeepAlive:
        """See ``Store``. A lease that this store did not grant counts as never renewed until the first answer."""
        with self._lock:
            granted_at = self._granted_at.pop(lease, float("-inf"))
            kept = EtcdKeepAlive(self._channels, lease, ttl_s, on_lost, self._clock, granted_at)
            self._track(kept)
        return kept

    def watch(self, prefix: str, on_event: Callable[[WatchEvent], None]) -> EtcdWatch:
        """See ``Store``."""
        return self.watch_all({prefix: on_event})

    def watch_all(self, feeds: Mapping[str, Callable[[WatchEvent], None]]) -> EtcdWatch:
        """See ``Store``."""
        with self._lock:
            # One short try a round: the watch has its own loop, which close() can end.
            watch = EtcdWatch(self._channels, feeds, lambda prefix: self._list(prefix, self._channels.try_s), self._relist_s)
            self._track(watch)
        return watch

    def _track(self, background: EtcdWatch | EtcdKeepAlive) -> None:
        self._running = [*(other for other in self._running if other.running), background]

    def cut_off(self, seconds: float) -> None:
        """See ``Store``."""
        self._channels.cut_off(seconds)

    def close(self) -> None:
        """See ``Store``; idempotent."""
        with self._lock:
            running, self._running = self._running, []
        for background in running:
            background.stop()
        self._channels.close()  # ends calls in flight, so that nothing below waits for a dead server
        for background in running:
            background.close()


def _probe(txn: Txn) -> object:
    """A read that this user may surely make: of a key that the transaction names."""
    names = [guard.key for guard in txn.guards] + [getattr(op, "key", None) or getattr(op, "prefix", "") for op in txn.ops]
    return rpc.RangeRequest(key=raw(names[0] if names and names[0] else "\0"), count_only=True)
