"""What tmrun asks of a store: linearizable reads, guarded transactions, leases, watches.

Two implementations: ``memory`` (a model of etcd with a virtual clock) and ``etcd``. Both pass the same contract suite.
May not know: the key layout, the protocol, which implementation it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tmrun.core.txn import KeyValue, Listing, Txn, TxnResult


@dataclass(frozen=True, slots=True)
class Changed:
    """One watch event; ``value`` is None when the key was deleted."""

    key: str
    value: KeyValue | None
    revision: int


@dataclass(frozen=True, slots=True)
class Resync:
    """The watch may have missed events (first listing, reconnect after compaction): here is everything, anew."""

    listing: Listing


WatchEvent = Changed | Resync


class Watch(Protocol):
    """A running subscription. Events are hints: they may repeat, and a Resync may come at any time."""

    def close(self) -> None:
        """Stop delivering. Idempotent; returns once no callback is running."""


class KeepAlive(Protocol):
    """Renews one lease until closed or lost."""

    @property
    def last_renewed(self) -> float:
        """Send time (seconds of the store's clock function) of the last acknowledged renewal."""

    @property
    def answer_s(self) -> float:
        """How long the last renewals took, the median of a few; 0 before there are some."""

    @property
    def lost(self) -> bool:
        """True once the store itself said that the lease is gone. An outage alone never sets it."""

    def close(self) -> None:
        """Stop renewing; the lease then runs out by itself."""


class Store(Protocol):
    """Every call has a deadline and raises only errors of ``tmrun.core.errors.StoreError``'s tree."""

    def get(self, key: str) -> KeyValue | None:
        """Linearizable read of one key."""

    def list(self, prefix: str) -> Listing:
        """Linearizable read of all keys with the prefix, in key order, at one revision."""

    def list_all(self, prefixes: Sequence[str]) -> Listing:
        """``list`` for several prefixes, none of which begins with another, all at one revision."""

    def commit(self, txn: Txn) -> TxnResult:
        """Run one guarded transaction.

        Raises OutcomeUnknown when the request was sent and no answer came: the caller must re-read before it retries.
        """

    def put(self, key: str, value: str, lease: int = 0) -> None:
        """Unguarded write; safe to retry, and retried."""

    def grant(self, ttl_s: int) -> int:
        """New lease; returns its id."""

    def revoke(self, lease: int) -> None:
        """End a lease now; its keys are deleted. Revoking an unknown lease is no error."""

    def keep_alive(self, lease: int, ttl_s: int, on_lost: Callable[[], None]) -> KeepAlive:
        """Renew in the background every ttl/5; ``on_lost`` is called once, from a background thread."""

    def watch(self, prefix: str, on_event: Callable[[WatchEvent], None]) -> Watch:
        """List, deliver a Resync, then every change after it, for ever; re-lists by itself after any gap and every 30 s.

        ``on_event`` runs on a background thread, one call at a time, in revision order.
        """

    def watch_all(self, feeds: Mapping[str, Callable[[WatchEvent], None]]) -> Watch:
        """``watch`` for several prefixes (prefix -> ``on_event``) on one stream. The order holds within each prefix, not between them."""

    def cut_off(self, seconds: float) -> None:
        """Reach nobody for so long, as a host does whose network is gone. For faults on purpose; returns at once."""

    def close(self) -> None:
        """Close watches, keep-alives and connections."""
