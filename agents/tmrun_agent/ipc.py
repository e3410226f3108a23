"""The unix socket that workers connect to: control messages into the inbox, store requests to the rendezvous service.

May not know: what the messages mean for the node.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tmrun import unixsocket, wire
from tmrun.core.errors import WireError

_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A control message from the worker with this pid."""

    pid: int
    local_rank: int
    message: wire.Message


class WorkerServer:
    """Accepts workers for the life of the agent. One thread a connection; ``said`` and ``serve`` are called from them."""

    def __init__(self, path: Path, said: Callable[[WorkerSaid], None], serve: Callable[[wire.StoreRequest], wire.StoreReply]) -> None:
        self._said, self._serve = said, serve
        self._lock = threading.Lock()
        self._controls: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._over = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)  # of an earlier life of this agent, which was killed
        with unixsocket.address(str(path)) as address:
            self._listener.bind(address)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="ipc-accept", daemon=True).start()

    def send(self, pid: int, message: wire.Message) -> bool:
        """Write to one worker, from any thread; False when it is not connected (any more): its exit tells the rest."""
        with self._lock:
            sock, sending = self._controls.get(pid, (None, None))
        if sock is None or sending is None:
            return False
        try:
            with sending:
                wire.send(sock, message)
        except OSError:
            return False
        return True

    def connected(self, pid: int) -> bool:
        """True once the worker's control channel is open."""
        with self._lock:
            return pid in self._controls

    def close(self) -> None:
        """Stop accepting and drop all connections."""
        self._over.set()
        with self._lock:
            sockets = [self._listener, *(sock for sock, _ in self._controls.values())]
        for sock in sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._over.wait(_AGAIN_S)  # out of descriptors for a moment, unless it is the end
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        """Out of threads for a moment: it waits for one, since its worker connects only once."""
        while not self._over.is_set():
            try:
                threading.Thread(target=self._connection, args=(sock,), name="ipc-worker", daemon=True).start()
                return
            except RuntimeError:
                self._over.wait(_AGAIN_S)
        sock.close()

    def _connection(self, sock: socket.socket) -> None:
        with sock:
            try:
                hello = wire.receive(sock)
                if isinstance(hello, wire.Hello):
                    (self._control if hello.channel is wire.Channel.CONTROL else self._store)(sock, hello)
            except (OSError, WireError):
                return  # the worker ended, or is not one of ours; its exit is what counts

    def _control(self, sock: socket.socket, hello: wire.Hello) -> None:
        with self._lock:
            self._controls[hello.pid] = sock, threading.Lock()
        self._said(WorkerSaid(hello.pid, hello.local_rank, hello))
        try:
            while (message := wire.receive(sock)) is not None:
                self._said(WorkerSaid(hello.pid, hello.local_rank, message))
        finally:
            with self._lock:
                self._controls.pop(hello.pid, None)

    def _store(self, sock: socket.socket, hello: wire.Hello) -> None:
        while (request := wire.receive(sock)) is not None:
            if not isinstance(request, wire.StoreRequest):
                raise WireError(f"unexpected {type(request).__name__} on a store channel")
            wire.send(sock, self._serve(request))
