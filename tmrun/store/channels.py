"""Calls to an etcd cluster that end: one channel a member, fail-over, deadlines, auth tokens, errors of our own tree.

The rule for retries: a request is sent again only if that is harmless (``resend``), or if the failure proves that the
first one never reached a server. To keep such proofs common, a request that must not be repeated goes out only on a
channel that has just answered something (``probe``).
May not know: what is stored, watches, leases.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc

from tmrun.core.errors import LeaseGone, OutcomeUnknown, StoreDenied, StoreError, StoreUnavailable
from tmrun.store.endpoints import Endpoints, TlsFiles
from tmrun.store.etcd_stubs import rpc

TRY_S = 1.5
DEADLINE_S = 10.0
UNREPEATABLE_TRY_S = 3.0
"""A commit is worth a longer wait: its silence costs the caller a re-read, and an election of etcd takes up to 2 s."""

_OPTIONS = (
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # without it a hung etcd goes unseen for over 40 s
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),  # 1 provokes GOAWAY
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the limit of one connection attempt: a store busy with thousands needs it
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),  # else a proxy variable breaks even loopback
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # retries are decided here
    ("grpc.use_local_subchannel_pool", 1),  # a store never inherits another one's reconnect back-off
)
_HAS_LEADER = ("hasleader", "true")  # a member without a quorum refuses instead of hanging
_TOKEN_RENEWALS = 2


class Fault(Enum):
    """What a failed call means for the next step."""

    UNSENT = "never reached the store: try the next endpoint"
    AMBIGUOUS = "may have been done"
    TOKEN = "refused for an old auth token: renew it"
    DENIED = "refused"
    LEASE_GONE = "names a dead lease"
    REJECTED = "answered with an error that a retry will not cure"


_BY_DETAILS = (
    ("failed to connect to all addresses", Fault.UNSENT),
    ("DNS resolution failed", Fault.UNSENT),
    ("etcdserver: no leader", Fault.UNSENT),
    ("etcdserver: too many requests", Fault.UNSENT),
    ("invalid auth token", Fault.TOKEN),
    ("revision of auth store is old", Fault.TOKEN),
    ("requested lease not found", Fault.LEASE_GONE),
    ("authentication failed", Fault.DENIED),
    ("authentication is not enabled", Fault.DENIED),
    ("user name is empty", Fault.DENIED),
)
_BY_CODE = {
    grpc.StatusCode.UNAUTHENTICATED: Fault.TOKEN,
    grpc.StatusCode.PERMISSION_DENIED: Fault.DENIED,
    grpc.StatusCode.UNAVAILABLE: Fault.AMBIGUOUS,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.AMBIGUOUS,
    grpc.StatusCode.CANCELLED: Fault.AMBIGUOUS,
    grpc.StatusCode.UNKNOWN: Fault.AMBIGUOUS,
    grpc.StatusCode.INTERNAL: Fault.AMBIGUOUS,
}


def classify(code: Any, details: str) -> Fault:
    """etcd's own words decide before gRPC's code: many of its errors share a code."""
    for words, fault in _BY_DETAILS:
        if words in details:
            return fault
    return _BY_CODE.get(code, Fault.REJECTED)


class CallFailed(Exception):
    """One attempt failed (internal to the store; never raised to its callers)."""

    def __init__(self, fault: Fault, endpoint: Endpoint, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.fault = fault
        self.endpoint = endpoint

    @classmethod
    def of(cls, error: Any, endpoint: Endpoint) -> CallFailed:
        """From a ``grpc.RpcError``, all of which carry code and details when they come from a call."""
        details = error.details() or ""
        return cls(classify(error.code(), details), endpoint, error.code().name, details)


class Backoff:
    """Growing pauses with jitter."""

    def __init__(self, first_s: float = 0.05, most_s: float = 0.5) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """The next pause."""
        pause = self._next_s * random.uniform(0.5, 1.5)
        self._next_s = min(self._next_s * 2, self._most_s)
        return pause

    def reset(self) -> None:
        """It works again."""
        self._next_s = self._first_s


@dataclass(slots=True, eq=False)
class Endpoint:
    """One member's channel and stubs; ``proven``: its last call was answered."""

    address: str
    channel: Any
    kv: Any
    lease: Any
    watch: Any
    auth: Any
    proven: bool = False


class Channels:
    """Thread-safe; opens nothing until the first call."""

    def __init__(
        self,
        where: Endpoints,
        user: str | None = None,
        password: str | None = None,
        tls: TlsFiles | None = None,
        deadline_s: float = DEADLINE_S,
        try_s: float = TRY_S,
    ) -> None:
        self._addresses = where.addresses
        self._credentials = _credentials(tls or TlsFiles()) if tls or where.tls else None
        self._endpoints = self._open_all()
        self._hole: socket.socket | None = None
        self._healer: threading.Timer | None = None
        self._at = random.randrange(len(self._endpoints))  # many agents must not all use the first member
        self._user, self._password = user, password or ""
        self._token: str | None = None
        self._deadline_s = deadline_s
        self.try_s = try_s
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._closed = threading.Event()

    @property
    def closed(self) -> bool:
        """No call will succeed any more."""
        return self._closed.is_set()

    def close(self) -> None:
        """Abort what is in flight and close all connections."""
        self._closed.set()
        self._fill_hole()
        for endpoint in self._endpoints:
            endpoint.channel.close()

    def cut_off(self, seconds: float) -> None:
        """Reach no member for so long, as if the network had swallowed every packet: a fault on purpose. Returns at once."""
        self._fill_hole()
        self._hole = socket.create_server(("127.0.0.1", 0))  # the kernel lets in, and nobody ever answers
        self._healer = threading.Timer(seconds, self._heal)
        self._healer.daemon = True
        self._replace([_open(f"127.0.0.1:{self._hole.getsockname()[1]}", None) for _ in self._addresses])
        self._healer.start()

    def _heal(self) -> None:
        self._replace(self._open_all())
        self._fill_hole()

    def _fill_hole(self) -> None:
        if self._healer is not None:
            self._healer.cancel()
        if self._hole is not None:
            self._hole.close()

    def _open_all(self) -> list[Endpoint]:
        return [_open(address, self._credentials) for address in self._addresses]

    def _replace(self, endpoints: list[Endpoint]) -> None:
        with self._lock:
            old, self._endpoints = self._endpoints, endpoints
        for endpoint in endpoints if self.closed else old:
            endpoint.channel.close()

    def is_gone(self, endpoint: Endpoint) -> bool:
        """Its channel was closed by us."""
        return self.closed or endpoint not in self._endpoints

    def current(self) -> Endpoint:
        """The member to talk to now."""
        return self._endpoints[self._at]

    def rotate(self, failed: Endpoint) -> None:
        """Go to the next member, unless another thread has done so already."""
        failed.proven = False
        with self._lock:
            if self._endpoints[self._at] is failed:
                self._at = (self._at + 1) % len(self._endpoints)

    def metadata(self, deadline_s: float | None = None) -> tuple[tuple[str, str], ...]:
        """What every call carries; fetches a token first where a user is given."""
        if self._user is None:
            return (_HAS_LEADER,)
        return (_HAS_LEADER, ("token", self._token or self.renew_token(None, deadline_s)))

    def renew_token(self, stale: str | None, deadline_s: float | None = None) -> str:
        """A new token, or the one that another thread has fetched in place of ``stale`` meanwhile."""
        span_s = self._deadline_s if deadline_s is None else deadline_s
        if not self._renewing.acquire(timeout=span_s):  # another thread is at it, and etcd does not answer it
            raise StoreUnavailable(f"no auth token from etcd within {span_s:.3g} s; check that it runs and that this host reaches it")
        try:
            if self._token is None or self._token == stale:
                request = rpc.AuthenticateRequest(name=self._user, password=self._password)
                reply = self._call(lambda e: e.auth.Authenticate, request, deadline_s=span_s, anonymous=True, name="login")
                self._token = reply.token
            return str(self._token)
        finally:
            self._renewing.release()

    def recover(self, failed: CallFailed, used: Sequence[tuple[str, str]]) -> None:
        """After a broken stream: fetch a new token or rotate, as the failure asks for. Raises StoreError if that fails too."""
        if failed.fault is Fault.TOKEN and self._user is not None:
            self.renew_token(dict(used).get("token"), self.try_s)
        else:
            self.rotate(failed.endpoint)

    def call(
        self,
        method: Callable[[Endpoint], Any],
        request: Any,
        *,
        deadline_s: float | None = None,
        resend: bool = True,
        probe: Any = None,
        name: str = "request",
    ) -> Any:
        """One unary call within the deadline, on whichever member answers.

        ``resend=False``: never send it twice unless the first surely did not arrive; ``probe`` is then the read to check a channel with.
        """
        return self._call(method, request, deadline_s=deadline_s, resend=resend, probe=probe, name=name)

    def _call(
        self,
        method: Callable[[Endpoint], Any],
        request: Any,
        *,
        deadline_s: float | None = None,
        resend: bool = True,
        probe: Any = None,
        name: str = "request",
        anonymous: bool = False,
    ) -> Any:
        span_s = self._deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + span_s
        backoff = Backoff()
        renewals = 0
        while True:
            left_s = max(end - time.monotonic(), 0.01)
            metadata = (_HAS_LEADER,) if anonymous else self.metadata(left_s)
            try:
                return self._attempt(method, request, metadata, left_s, resend, probe)
            except CallFailed as failed:
                failure = failed
            if failure.fault is Fault.TOKEN and self._user is not None and not anonymous and renewals < _TOKEN_RENEWALS:
                renewals += 1
                self.renew_token(dict(metadata).get("token"), max(end - time.monotonic(), 0.01))
                continue
            self._raise_unless_retriable(failure, resend, name)
            self.rotate(failure.endpoint)
            pause_s = backoff.pause_s()
            if time.monotonic() + pause_s >= end:
                raise self._unavailable(failure, span_s)
            self._closed.wait(pause_s)

    def _attempt(self, method: Callable[[Endpoint], Any], request: Any, metadata: Any, left_s: float, resend: bool, probe: Any) -> Any:
        endpoint = self.current()
        if probe is not None and not endpoint.proven:
            try:
                self._send(endpoint, endpoint.kv.Range, probe, metadata, min(self.try_s, left_s))
            except CallFailed as failed:
                if failed.fault is Fault.AMBIGUOUS:
                    failed.fault = Fault.UNSENT  # only the probe was sent
                raise
        return self._send(endpoint, method(endpoint), request, metadata, min(self.try_s if resend else UNREPEATABLE_TRY_S, left_s))

    def _send(self, endpoint: Endpoint, method: Any, request: Any, metadata: Any, timeout_s: float) -> Any:
        try:
            reply = method(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise CallFailed.of(error, endpoint) from None
        except ValueError as error:  # what gRPC raises on a closed channel
            if self.is_gone(endpoint):
                raise CallFailed(Fault.UNSENT, endpoint, "CLOSED", str(error)) from None
            raise
        endpoint.proven = True
        return reply

    def _raise_unless_retriable(self, failure: CallFailed, resend: bool, name: str) -> None:
        at = f"etcd at {failure.endpoint.address}"
        if failure.fault is Fault.LEASE_GONE:
            raise LeaseGone(f"{at}: the lease in this {name} has expired or was revoked; take a new one")
        if failure.fault in (Fault.DENIED, Fault.TOKEN):
            raise StoreDenied(f"{at} refused the {name} ({failure}); check user, password and the permissions of that user")
        if failure.fault is Fault.REJECTED:
            raise StoreError(f"{at} rejected the {name} ({failure})")
        if failure.fault is Fault.AMBIGUOUS and not resend:
            self.rotate(failure.endpoint)
            raise OutcomeUnknown(f"{at} did not answer the {name} ({failure}); it may have been applied: re-read before retrying")
        if self.closed:
            raise StoreUnavailable("this connection to etcd was closed; open a new store")

    def _unavailable(self, failure: CallFailed, span_s: float) -> StoreUnavailable:
        where = ", ".join(endpoint.address for endpoint in self._endpoints)
        brief = f"no usable answer from etcd at {where} within {span_s:.3g} s"
        last = f"last, from {failure.endpoint.address}: {failure}"
        return StoreUnavailable(f"{brief} ({last}); check that it runs, that this host reaches it, and its TLS settings", brief)


def _open(address: str, credentials: Any) -> Endpoint:
    if credentials is None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
    return Endpoint(address, channel, rpc.KVStub(channel), rpc.LeaseStub(channel), rpc.WatchStub(channel), rpc.AuthStub(channel))


def _credentials(tls: TlsFiles) -> Any:
    ca, cert, key = (None if path is None else path.read_bytes() for path in (tls.ca, tls.cert, tls.key))
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
