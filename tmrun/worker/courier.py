"""Carries packed state to a partner's host memory in the background, over one TCP connection of its own.

    sender    connects to the partner, says the partner's token, sends one parcel after the other; tries again when the connection breaks
    receiver  listens, takes whatever its ward sends, hands on what arrived whole (a length and a CRC-32 for every part)

A plain connection, not a process group: it is cut without waking anybody else, and bulk data cannot get in the way of a vote. Parts are
sent straight from the packed buffers in small writes and received straight into buffers, without the GIL. Interfaces are chosen
as gloo chooses them (``tcp``). May not know: when a snapshot is taken, what is in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tmrun.worker import tcp
from tmrun.worker.agent_store import AgentStore
from tmrun.worker.transfer import Parcel

_HEADER = struct.Struct("<qQ")
_PART = struct.Struct("<QI")
_CHUNK = 1 << 20
_RETRY_S = 0.2


@dataclass(frozen=True)
class Route:
    """Who sends to whom: our rank sends to ``partner``; ``scope`` is the same for all ranks and new for every epoch."""

    rank: int
    partner: int
    scope: str

    def key(self, rank: int) -> str:
        """Where a rank publishes its address."""
        return f"{self.scope}/{rank}"


class Courier:
    """Two threads; both end soon after ``close``."""

    def __init__(
        self,
        route: Route,
        open_store: Callable[[], AgentStore],
        sent: Callable[[int, float], None],
        received: Callable[[int, Parcel], None],
    ) -> None:
        self._route, self._open_store, self._sent, self._received = route, open_store, sent, received
        self._outbox: queue.SimpleQueue[tuple[int, Parcel] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._clients: set[AgentStore] = set()
        self._closed = False

    def start(self) -> Courier:
        """Begin to listen, and to send what there is."""
        for target in (self._receive_all, self._send_all):
            threading.Thread(target=self._run, args=(target,), name=f"tmrun-courier-{self._route.scope}", daemon=True).start()
        return self

    def send(self, step: int, parcel: Parcel) -> None:
        """Send it when the ones before are sent; nobody may write to it until ``sent`` is called."""
        self._outbox.put((step, parcel))

    def close(self) -> None:
        """Stop at once, without waiting."""
        with self._lock:
            self._closed = True
            sockets, clients = list(self._sockets), list(self._clients)
        self._outbox.put(None)
        for sock in sockets:
            tcp.shut(sock)
        for client in clients:
            client.close()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except (OSError, RuntimeError):
            if not self._closed:
                raise

    # -- sending --------------------------------------------------------------------------------------------------------------------
    def _send_all(self) -> None:
        sock: socket.socket | None = None
        while (item := self._outbox.get()) is not None and not self._closed:
            while not self._closed:
                try:
                    sock = sock or self._connect()
                    began = time.monotonic()
                    send_parcel(sock, *item)
                    self._sent(item[0], time.monotonic() - began)
                    break
                except (OSError, RuntimeError):  # also: the partner's address is not known yet
                    self._drop(sock)
                    sock = None
                    time.sleep(_RETRY_S)
        self._drop(sock)

    def _connect(self) -> socket.socket:
        with self._store() as store:
            host, port, token = store.get(self._route.key(self._route.partner)).decode().rsplit(":", 2)
        sock = self._keep(socket.create_connection((host, int(port))))
        sock.sendall(bytes.fromhex(token))
        return sock

    # -- receiving ------------------------------------------------------------------------------------------------------------------
    def _receive_all(self) -> None:
        listener = self._keep(tcp.listen(backlog=4))
        try:
            self._serve(listener)
        finally:
            self._drop(listener)

    def _serve(self, listener: socket.socket) -> None:
        token = secrets.token_bytes(tcp.TOKEN_BYTES)
        host, port = listener.getsockname()[:2]
        with self._store() as store:
            store.set(self._route.key(self._route.rank), f"{host}:{port}:{token.hex()}")
        while not self._closed:
            ward = self._keep(listener.accept()[0])
            try:
                ward.settimeout(tcp.GREETING_S)
                if hmac.compare_digest(tcp.exactly(ward, tcp.TOKEN_BYTES), token):
                    ward.settimeout(None)
                    self._take_from(ward)
            except (OSError, ValueError):
                pass  # it connects again
            finally:
                self._drop(ward)

    def _take_from(self, ward: socket.socket) -> None:
        while True:
            step, parcel = receive_parcel(ward)
            with self._lock:
                if self._closed:
                    return
            self._received(step, parcel)

    # -- sockets --------------------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _store(self) -> Iterator[AgentStore]:
        client = self._open_store()
        with self._lock:
            self._clients.add(client)
            if self._closed:
                client.close()
        try:
            yield client
        finally:
            with self._lock:
                self._clients.discard(client)
            client.dispose()

    def _keep(self, sock: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.add(sock)
            if self._closed:
                tcp.shut(sock)
        return sock

    def _drop(self, sock: socket.socket | None) -> None:
        if sock is not None:
            with self._lock:
                self._sockets.discard(sock)
            sock.close()


def send_parcel(sock: socket.socket, step: int, parcel: Parcel) -> None:
    """Write one parcel."""
    parts = [memoryview(parcel.body), *(view(bucket) for bucket in parcel.buckets)]
    sock.sendall(_HEADER.pack(step, len(parts)))
    for part in parts:
        sock.sendall(_PART.pack(len(part), zlib.crc32(part)))
        for start in range(0, len(part), _CHUNK):
            sock.sendall(part[start : start + _CHUNK])


def receive_parcel(sock: socket.socket) -> tuple[int, Parcel]:
    """Read one parcel. Raises OSError at the end of the stream, ValueError when it is damaged."""
    step, count = _HEADER.unpack(tcp.exactly(sock, _HEADER.size))
    buckets = [_receive_part(sock) for _ in range(count)]
    return step, Parcel(bytes(view(buckets[0])), buckets[1:])


def _receive_part(sock: socket.socket) -> torch.Tensor:
    length, checksum = _PART.unpack(tcp.exactly(sock, _PART.size))
    buffer = torch.empty(length, dtype=torch.uint8)
    tcp.fill(sock, view(buffer))
    if zlib.crc32(view(buffer)) != checksum:
        raise ValueError(f"a part of {length} bytes arrived damaged")
    return buffer


def view(tensor: torch.Tensor) -> memoryview:
    """A uint8 tensor's memory; the tensor has to outlive it."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
