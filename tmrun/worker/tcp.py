"""Plain TCP connections between workers: where peers reach this process, and how a connection is read and shut.

The interface is the one that gloo would choose (GLOO_SOCKET_IFNAME, else what the host name resolves to).
May not know: who listens, what is said.
"""

from __future__ import annotations

import os
import socket

from tmrun import interfaces

_LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 20
TOKEN_BYTES = 16
"""Of what a listener leaves in the store, so that it knows who has read it there."""
GREETING_S = 10.0
"""How long whoever connects may take to say it."""


def own() -> str:
    """Our address for peers, IPv4 if the interface has one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    found = interfaces.address_of(interface) if interface else _of_name()
    return found or _LOOPBACK


def listen(backlog: int) -> socket.socket:
    """A listening socket there, on a port of its own. Raises OSError."""
    host = own()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def _of_name() -> str | None:
    """IPv4 first; None: the name is not known here."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return str(found[0][4][0]) if found else None


def exactly(sock: socket.socket, size: int) -> bytearray:
    """The next so many bytes. Raises OSError at the end of the stream."""
    body = bytearray(size)
    fill(sock, memoryview(body))
    return body


def fill(sock: socket.socket, target: memoryview) -> None:
    """Read until it is full. Raises OSError at the end of the stream."""
    done = 0
    while done < len(target):
        got = sock.recv_into(target[done : done + _CHUNK])
        if not got:
            raise ConnectionResetError("the peer has closed the connection")
        done += got


def shut(sock: socket.socket) -> bool:
    """Wake whoever reads or writes; whether it was open."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
