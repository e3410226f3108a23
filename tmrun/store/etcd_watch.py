"""A watch on etcd that never ends by itself and never stays wrong for long; of one prefix, or of several on one stream.

List, deliver that as a Resync, stream from the next revision; each prefix for itself. A broken stream resumes after the last event seen; a
compacted one lists again; and every stream is given a lifetime of about 30 s, after which everything is listed again,
so that whatever went unnoticed heals.
May not know: what the keys mean.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from tmrun.core.errors import StoreError
from tmrun.core.txn import KeyValue, Listing
from tmrun.store.api import Changed, Resync, WatchEvent
from tmrun.store.channels import Backoff, CallFailed, Channels, Endpoint, Fault
from tmrun.store.etcd_codec import key_value, prefix_range, text
from tmrun.store.etcd_stubs import rpc

RELIST_S = 30.0
_log = logging.getLogger("tmrun.store")


class EtcdWatch:
    """One daemon thread and one stream."""

    def __init__(
        self,
        channels: Channels,
        feeds: Mapping[str, Callable[[WatchEvent], None]],
        list_once: Callable[[str], Listing],
        relist_s: float = RELIST_S,
    ) -> None:
        self._channels = channels
        self._feeds = dict(feeds)
        self._name = ", ".join(feeds)
        self._list_once = list_once
        self._relist_s = relist_s
        self._relist_at = 0.0  # at once
        self._next_revision = dict.fromkeys(feeds, 0)
        self._backoff = Backoff(most_s=1.0)
        self._stop = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="tmrun-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop delivering; returns once no callback is running, unless called from the callback itself."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def running(self) -> bool:
        """Its thread has not ended yet."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """The part of ``close`` that does not wait."""
        self._stop.set()
        call = self._call
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if time.monotonic() >= self._relist_at:
                    self._relist()
                ended_well = self._stream()
            except StoreError as error:
                _log.info("watch on %s: %s", self._name, error)  # told to people by whoever asks the store for something
                ended_well = False
            if not ended_well:
                self._stop.wait(self._backoff.pause_s())

    def _relist(self) -> None:
        for prefix in self._feeds:
            listing = self._list_once(prefix)
            self._next_revision[prefix] = listing.revision + 1
            self._deliver(prefix, Resync(listing))
        # Jitter: a thousand agents started at once must not list at once for ever after.
        self._relist_at = time.monotonic() + self._relist_s * random.uniform(0.9, 1.1)

    def _stream(self) -> bool:
        """Follow one stream until it ends; False: pause before the next one."""
        endpoint = self._channels.current()
        metadata = self._channels.metadata(self._channels.try_s)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for prefix in self._feeds:
            requests.put(self._create_request(prefix))
        timeout_s = max(self._relist_at - time.monotonic(), 0.01)
        try:
            # The request side stays open until None: etcd ends a watch whose client half-closes.
            self._call = endpoint.watch.Watch(iter(requests.get, None), timeout=timeout_s, metadata=metadata)
            if self._stop.is_set():
                return True
            return self._follow(self._call, endpoint, metadata)
        except ValueError:
            if self._channels.is_gone(endpoint):
                return True
            raise
        finally:
            requests.put(None)
            if self._call is not None:
                self._call.cancel()
            self._call = None

    def _create_request(self, prefix: str) -> Any:
        key, range_end = prefix_range(prefix)
        first = self._next_revision[prefix]
        return rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=key, range_end=range_end, start_revision=first))

    def _follow(self, call: Any, endpoint: Endpoint, metadata: tuple[tuple[str, str], ...]) -> bool:
        try:
            unnamed, names = list(self._feeds), dict[int, str]()
            for reply in call:
                if reply.created:  # in the order of the requests
                    names[reply.watch_id] = unnamed.pop(0)
                if reply.compact_revision:  # events between our last one and that revision are lost
                    self._relist_at = 0.0
                    return True
                if reply.canceled:
                    raise CallFailed(_cancel_fault(reply.cancel_reason), endpoint, "CANCELLED", reply.cancel_reason)
                self._take(names[reply.watch_id], reply.events)
            return False
        except grpc.RpcError as error:
            failed = CallFailed.of(error, endpoint)
        except CallFailed as cancelled:
            failed = cancelled
        if self._stop.is_set() or time.monotonic() >= self._relist_at:
            return True  # the stream's planned end
        _log.info("watch on %s at %s broke (%s), resuming", self._name, endpoint.address, failed)
        self._channels.recover(failed, metadata)
        return False

    def _take(self, prefix: str, events: Any) -> None:
        for event in events:
            if self._stop.is_set():
                return
            gone = event.type == event.DELETE
            value: KeyValue | None = None if gone else key_value(event.kv)
            self._deliver(prefix, Changed(text(event.kv.key), value, event.kv.mod_revision))
        if events:
            # Only after the last: etcd sends all events of a revision in one reply, so a revision is never split.
            self._next_revision[prefix] = events[-1].kv.mod_revision + 1
            self._backoff.reset()

    def _deliver(self, prefix: str, event: WatchEvent) -> None:
        if self._stop.is_set():
            return
        try:
            self._feeds[prefix](event)
        except Exception:  # a bug in the receiver must not turn into a watch that is silently dead
            _log.exception("watch on %s: the receiver of %r failed", self._name, type(event).__name__)


def _cancel_fault(reason: str) -> Fault:
    """etcd reports a stale token on a watch as "permission denied" too, so that is worth one new token a round."""
    return Fault.TOKEN if "auth" in reason or "ermission" in reason else Fault.AMBIGUOUS
