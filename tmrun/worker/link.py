"""The control channel to the agent of this machine.

One reader thread hands every message to a callback; any thread may send. If the agent goes away this process ends itself at once:
without an agent nobody renews our claim on the rank, so a successor may start at any moment. May not know: what messages mean.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from tmrun import unixsocket, wire

EXIT_FENCED = 76
"""Exit code of a worker whose agent went away."""


class Link:
    """A connected control channel; ``start`` begins to deliver."""

    def __init__(self, path: str, local_rank: int) -> None:
        self._socket = connect(path, wire.Channel.CONTROL, local_rank)
        self._sending = threading.Lock()

    def start(self, deliver: Callable[[wire.Message], None]) -> None:
        """Deliver every message on a thread of its own, in order."""
        threading.Thread(target=self._read, args=(deliver,), name="tmrun-link", daemon=True).start()

    def send(self, message: wire.Message) -> None:
        """Send one message; ends the process if the agent is gone."""
        try:
            with self._sending:
                wire.send(self._socket, message)
        except OSError as error:
            fence(f"cannot reach the agent: {error}")

    def _read(self, deliver: Callable[[wire.Message], None]) -> None:
        try:
            while (message := wire.receive(self._socket)) is not None:
                deliver(message)
        except BaseException as error:  # a deaf worker would wait for ever
            fence(f"control channel: {type(error).__name__}: {error}")
        fence("the agent closed the control channel")


def connect(path: str, channel: wire.Channel, local_rank: int) -> socket.socket:
    """A new connection to the agent, already introduced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with unixsocket.address(path) as address:
            sock.connect(address)
        wire.send(sock, wire.Hello(channel, local_rank, os.getpid()))
    except BaseException:
        sock.close()
        raise
    return sock


def fence(reason: str) -> NoReturn:
    """End this process now, whatever its other threads do."""
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"tmrun: worker {os.getpid()} ends: {reason}\n".encode())
    finally:
        os._exit(EXIT_FENCED)
