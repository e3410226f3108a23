"""An agent for tests: a real unix socket, the store in memory, and every worker's messages in a list."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tmrun import wire


class Channel:
    """One worker's control channel, as the agent sees it."""

    def __init__(self, sock: socket.socket, hello: wire.Hello) -> None:
        self.sock, self.pid = sock, hello.pid
        self.messages: list[wire.Message] = []

    def send(self, message: wire.Message) -> None:
        wire.send(self.sock, message)


class FakeAgent:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.changed = threading.Condition()
        self.channels: dict[int, Channel] = {}
        self._store: dict[str, bytes] = {}
        self._stopped = False
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._spawn(self._accept)

    def wait(self, until: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(until, timeout_s), f"{what}: not within {timeout_s} s"

    def close(self) -> None:
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), thread
        self._listener.close()

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                hello = wire.receive(connection)
                if isinstance(hello, wire.Hello):
                    (self._control if hello.channel is wire.Channel.CONTROL else self._serve_store)(connection, hello)
            except OSError:
                pass
            self._connections.remove(connection)

    def _control(self, connection: socket.socket, hello: wire.Hello) -> None:
        channel = Channel(connection, hello)
        with self.changed:
            self.channels[hello.pid] = channel
            self.changed.notify_all()
        while (message := wire.receive(connection)) is not None:
            with self.changed:
                channel.messages.append(message)
                self.changed.notify_all()

    def _serve_store(self, connection: socket.socket, hello: wire.Hello) -> None:
        while (request := wire.receive(connection)) is not None:
            assert isinstance(request, wire.StoreRequest)
            wire.send(connection, self._answer(request))

    def _answer(self, request: wire.StoreRequest) -> wire.StoreReply:
        with self.changed:
            return getattr(self, f"_{request.op.value}")(request)

    def _await_keys(self, request: wire.StoreRequest) -> bool:
        deadline = time.monotonic() + request.timeout_s
        ready = lambda: self._stopped or all(k in self._store for k in request.keys)  # noqa: E731
        return self.changed.wait_for(ready, max(0.0, deadline - time.monotonic())) and not self._stopped

    def _put(self, key: str, value: bytes) -> None:
        self._store[key] = value
        self.changed.notify_all()

    def _set(self, request: wire.StoreRequest) -> wire.StoreReply:
        self._put(request.keys[0], base64.b64decode(request.value))
        return wire.StoreReply()

    def _get(self, request: wire.StoreRequest) -> wire.StoreReply:
        if not self._await_keys(request):
            return wire.StoreReply(error="timeout")
        return wire.StoreReply(value=_text(self._store[request.keys[0]]))

    def _wait(self, request: wire.StoreRequest) -> wire.StoreReply:
        return wire.StoreReply() if self._await_keys(request) else wire.StoreReply(error="timeout")

    def _add(self, request: wire.StoreRequest) -> wire.StoreReply:
        number = int(self._store.get(request.keys[0], b"0")) + request.amount
        self._put(request.keys[0], str(number).encode())
        return wire.StoreReply(number=number)

    def _check(self, request: wire.StoreRequest) -> wire.StoreReply:
        return wire.StoreReply(found=all(k in self._store for k in request.keys))

    def _compare_set(self, request: wire.StoreRequest) -> wire.StoreReply:
        key, expected = request.keys[0], base64.b64decode(request.expected)
        held = self._store.get(key)
        if held == expected or (held is None and not expected):
            self._put(key, base64.b64decode(request.value))
        return wire.StoreReply(value=_text(self._store.get(key, expected)))

    def _delete(self, request: wire.StoreRequest) -> wire.StoreReply:
        return wire.StoreReply(found=self._store.pop(request.keys[0], None) is not None)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
