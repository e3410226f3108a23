"""Keeping one lease of etcd alive, and knowing for how long it surely is.

A renewal counts from the moment its request was *sent*: etcd cannot have restarted the lease's clock earlier. Only the
store can say that a lease is gone; while nobody answers, the same lease is tried again, for ever, because after a lost
quorum it comes back with its full TTL.
May not know: what the lease protects.
"""

from __future__ import annotations

import logging
import queue
import random
import statistics
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from tmrun.core.errors import StoreError
from tmrun.store.channels import Backoff, CallFailed, Channels, Endpoint, Fault
from tmrun.store.etcd_stubs import rpc

RENEWALS_A_TTL = 5
ANSWERS = 5
"""So many renewals tell how quick the store is."""
_log = logging.getLogger("tmrun.store")


class _Stream:
    """One LeaseKeepAlive stream, used as question and answer with a time limit on the answer."""

    def __init__(self, endpoint: Endpoint, metadata: Any) -> None:
        self._endpoint = endpoint
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = endpoint.lease.LeaseKeepAlive(iter(self._requests.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="tmrun-keepalive-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            for reply in self._call:
                self._replies.put(reply)
            self._replies.put(CallFailed(Fault.AMBIGUOUS, self._endpoint, "EOF", "the server ended the stream"))
        except grpc.RpcError as error:
            self._replies.put(CallFailed.of(error, self._endpoint))

    def renew(self, lease: int, timeout_s: float) -> int:
        """The lease's new TTL; 0 or less: it is gone."""
        self._requests.put(rpc.LeaseKeepAliveRequest(ID=lease))
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise CallFailed(Fault.AMBIGUOUS, self._endpoint, "DEADLINE_EXCEEDED", f"no answer for {timeout_s:.3g} s") from None
        if isinstance(reply, CallFailed):
            raise reply
        return int(reply.TTL)

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._reader.join()


class EtcdKeepAlive:
    """One daemon thread (and one for its current stream)."""

    def __init__(
        self,
        channels: Channels,
        lease: int,
        ttl_s: int,
        on_lost: Callable[[], None],
        clock: Callable[[], float],
        granted_at: float,
    ) -> None:
        self._channels = channels
        self._lease = lease
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._clock = clock
        self._last_renewed = granted_at
        self._lost = False
        self._took: deque[float] = deque(maxlen=ANSWERS)
        self._stop = threading.Event()
        self._backoff = Backoff(0.05, min(1.0, ttl_s / RENEWALS_A_TTL))
        self._thread = threading.Thread(target=self._run, name="tmrun-keepalive", daemon=True)
        self._thread.start()

    @property
    def last_renewed(self) -> float:
        """Send time of the last acknowledged renewal; until then, of the grant."""
        return self._last_renewed

    @property
    def answer_s(self) -> float:
        """Median of the last renewals, from the request to its answer."""
        took = list(self._took)
        return statistics.median(took) if len(took) == ANSWERS else 0.0

    @property
    def lost(self) -> bool:
        """The store said that the lease is gone."""
        return self._lost

    @property
    def running(self) -> bool:
        """Its thread has not ended yet."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """The part of ``close`` that does not wait."""
        self._stop.set()

    def close(self) -> None:
        """Stop renewing; the lease then runs out by itself."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() and not self._lost:
            try:
                self._follow()
            except StoreError as error:  # no token to be had just now
                _log.info("keep-alive of lease %x: %s", self._lease, error)
            if not self._lost:
                self._stop.wait(self._backoff.pause_s())
        if self._lost and not self._stop.is_set():
            self._on_lost()

    def _follow(self) -> None:
        """Renew on one stream until it breaks, the lease is lost, or we are stopped."""
        endpoint = self._channels.current()
        metadata = self._channels.metadata(self._channels.try_s)
        try:
            stream = _Stream(endpoint, metadata)
        except ValueError:
            if self._channels.is_gone(endpoint):
                return
            raise
        try:
            while not self._stop.is_set() and self._renew(stream):
                self._stop.wait(self._ttl_s / RENEWALS_A_TTL * random.uniform(0.8, 1.0))
        except CallFailed as failed:
            if not self._stop.is_set():
                _log.info("keep-alive of lease %x at %s: %s; trying again", self._lease, endpoint.address, failed)
                self._channels.recover(failed, metadata)
        finally:
            stream.close()

    def _renew(self, stream: _Stream) -> bool:
        sent = self._clock()
        ttl_s = stream.renew(self._lease, self._channels.try_s)
        if ttl_s <= 0:
            self._lost = True
            return False
        self._last_renewed = sent
        self._took.append(self._clock() - sent)
        self._backoff.reset()
        return True
