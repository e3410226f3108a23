"""Small messages from rank to rank over TCP connections of their own: what votes are held over.

A process group would do, but its messages pass a thread on each side; on machines whose cores are all at work that costs a step more than
all else that a vote does. Here whoever waits for a message reads it itself, and is woken by shutting the connection. What is sent fits
into the kernel's buffers as a rule; what does not is sent by a thread, because peers send to each other before they read.

Connections are made while training goes on, one for each two ranks that have something to say to each other: the lower rank connects
and says the token that the higher one left in the store. Interfaces are chosen as gloo chooses them (``tcp``).
May not know: what is said.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tmrun.worker import tcp
from tmrun.worker.comm_gloo import BUILD_TIMEOUT, Opened

_AT_ONCE = 64 << 10
"""Bytes that a connection's buffers take, whatever was sent before and is not read yet."""
_BUFFER = 4 * _AT_ONCE
_GREETING = struct.Struct(f"<{tcp.TOKEN_BYTES}sI")


class Wires:
    """One rank's connections, by peer. A ``comm.Connection``."""

    certain = True
    on_device = False

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._peers = dict(peers)
        self._sending: dict[int, threading.Thread] = {}
        for sock in self._peers.values():
            sock.settimeout(None)

    def __del__(self) -> None:
        for sock in self._peers.values():
            sock.close()

    def send(self, to: int, message: bytes) -> None:
        """Does not wait for the peer to read. Raises DistBackendError when the connection is lost."""
        if (before := self._sending.pop(to, None)) is not None:
            before.join()
        if len(message) > _AT_ONCE:
            self._sending[to] = threading.Thread(target=self._send_long, args=(to, message), name="tmrun-wire", daemon=True)
            self._sending[to].start()
            return
        try:
            self._peers[to].sendall(message)
        except OSError as error:
            raise _lost(to, error) from None

    def _send_long(self, to: int, message: bytes) -> None:
        with contextlib.suppress(OSError):  # who waits for an answer will notice
            self._peers[to].sendall(message)

    def receive(self, sender: int, size: int) -> bytearray:
        """The next so many bytes. Raises DistBackendError when the connection is lost."""
        try:
            return tcp.exactly(self._peers[sender], size)
        except OSError as error:
            raise _lost(sender, error) from None

    def abort(self) -> int:
        """Wake whoever sends or receives."""
        return sum(tcp.shut(sock) for sock in self._peers.values())

    close = abort

    def quiet(self) -> bool:
        """Nothing moves by itself."""
        return True

    def vacate(self) -> None:
        """There is no device's memory."""


def connect(store: Store, rank: int, peers: Collection[int], timeout: timedelta = BUILD_TIMEOUT) -> Wires:
    """To each peer, which does the same now. Raises RuntimeError when one does not come in time."""
    made: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo:
        try:
            for peer, sock in _meet(store, rank, peers, time.monotonic() + timeout.total_seconds()):
                made[peer] = undo.enter_context(sock)
            for sock in made.values():
                _prepare(sock)
        except OSError as error:
            raise RuntimeError(f"cannot connect to ranks {sorted(set(peers) - made.keys())} for votes: {error}") from None
        undo.pop_all()
    return Wires(made)


def _meet(store: Store, rank: int, peers: Collection[int], deadline: float) -> Iterator[tuple[int, socket.socket]]:
    with Opened(), tcp.listen(backlog=len(peers) + 1) as listener:  # else a group that is made meanwhile would take these for its own
        token = secrets.token_bytes(tcp.TOKEN_BYTES)
        host, port = listener.getsockname()[:2]
        store.set(f"wire/{rank}", f"{host} {port} {token.hex()}")
        for peer in sorted(p for p in peers if p > rank):
            yield peer, _call(store.get(f"wire/{peer}").decode(), rank, deadline)
        missing = {p for p in peers if p < rank}
        while missing:
            for peer, sock in _answer(listener, token, missing, deadline).items():
                missing.discard(peer)
                yield peer, sock


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for end in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        if sock.getsockopt(socket.SOL_SOCKET, end) < _BUFFER:
            sock.setsockopt(socket.SOL_SOCKET, end, _BUFFER)


def _call(where: str, rank: int, deadline: float) -> socket.socket:
    host, port, token = where.split(" ")
    sock = socket.create_connection((host, int(port)), _left(deadline))
    try:
        sock.sendall(_GREETING.pack(bytes.fromhex(token), rank))
    except BaseException:
        sock.close()
        raise
    return sock


def _answer(listener: socket.socket, token: bytes, expected: Collection[int], deadline: float) -> dict[int, socket.socket]:
    """A peer, or nobody if it was somebody else."""
    listener.settimeout(_left(deadline))
    sock = listener.accept()[0]
    try:
        sock.settimeout(min(tcp.GREETING_S, _left(deadline)))
        said, rank = _GREETING.unpack(tcp.exactly(sock, _GREETING.size))
        if hmac.compare_digest(said, token) and rank in expected:
            return {rank: sock}
    except OSError:
        pass
    sock.close()
    return {}


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _lost(peer: int, error: OSError) -> dist.DistBackendError:
    return dist.DistBackendError(f"Connection closed: rank {peer}: {error}")
