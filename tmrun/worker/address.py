"""Where peers reach this process: the interface that gloo would choose (GLOO_SOCKET_IFNAME, else what the host name resolves to).

May not know: who listens.
"""

from __future__ import annotations

import os
import socket

from tmrun import interfaces

_LOOPBACK = "127.0.0.1"


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
