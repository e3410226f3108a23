"""A launcher's last word: its sweeper, which outlives it by a moment, tells who asks that all processes of the launch are gone.

The sweeper listens where the member records of the launch's agents say (``address:port/digest``). What it answers is the launch's marker,
which nobody else on the network knows and whose digest is in the record: so an answer cannot come from anybody else, and none (no
route, a port that is closed, a wrong word) proves nothing. Runs inside the sweeper too: standard library only.
May not know: jobs, agents, stores.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import time

TIMEOUT_S = 0.3
LINGER_S = 15.0
_MAX_WORD = 64


def listen() -> socket.socket:
    """Where the sweeper will answer: any address of this machine, a port of its own. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", 0), backlog=128)


def record(address: str, listener: socket.socket, marker: str) -> str:
    """What agents tell others: ``address:port/digest``. ``address``: how other hosts reach this one."""
    return f"{address}:{listener.getsockname()[1]}/{_digest(marker)}"


def _digest(marker: str) -> str:
    return hashlib.sha256(marker.encode()).hexdigest()[:32]


def testify(listener: socket.socket, marker: str, seconds: float = LINGER_S) -> None:
    """Answer everybody who asks, also those who have been waiting."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            asker, _ = listener.accept()
            with asker:
                asker.settimeout(1)
                asker.sendall(marker.encode())
        except OSError:
            continue


def swept(witness: str) -> bool:
    """Ask. True: all processes of that launch are gone, beyond doubt. False: nothing is known."""
    where, _, digest = witness.rpartition("/")
    address, _, port = where.rpartition(":")
    try:
        with socket.create_connection((address, int(port)), timeout=TIMEOUT_S) as sock:
            sock.settimeout(TIMEOUT_S)
            word = b""
            while len(word) < _MAX_WORD and (part := sock.recv(_MAX_WORD)):
                word += part
    except (OSError, ValueError):
        return False
    return bool(word) and hmac.compare_digest(_digest(word.decode(errors="replace")), digest)
