"""Two proofs that all processes of a launch are gone, for who asks where the member records of its agents say (``address:port/digest``).

    the last word    the launcher's sweeper outlives it by a moment, kills what it left, then answers with the launch's marker, which nobody
                     else on the network knows and whose digest is in the record
    a closed port    launcher, sweeper, agents and workers all hold the one listening socket, so the kernel refuses a connection only after
                     the last of them has ended, however it ended; believed by who has reached that port before (``reached``)

Silence (no route, no answer, a wrong word, a host without power) proves nothing. Who lies is a firewall that starts to *refuse* connections
for a host that lives; those that drop packets or call the host unreachable do not.
Runs inside the sweeper too: standard library only. May not know: jobs, agents, stores.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import time
from enum import Enum

TIMEOUT_S = 0.3
LINGER_S = 15.0
_MAX_WORD = 64
_BACKLOG = 1024
"""Nobody takes connections while the launch lives."""


class Proof(str, Enum):
    """What proves that a launch is gone, for people; false: nothing does."""

    NONE = ""
    WORD = "its launch has ended and left nothing running, says its sweeper"
    CLOSED = "nothing of its launch is left, says its kernel: the port that all of its processes held is closed"


def listen() -> socket.socket:
    """Where the sweeper will answer: any address of this machine, a port of its own. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


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


def ask(witness: str) -> Proof:
    """Whether all processes of that launch are gone."""
    address, port, digest = _parts(witness)
    try:
        places = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return Proof.NONE
    found = {_ask(family, place, digest) for family, _, _, _, place in places}
    return Proof.WORD if Proof.WORD in found else Proof.CLOSED if found == {Proof.CLOSED} else Proof.NONE


def reached(witness: str) -> bool:
    """Whether the port can be reached from here; until it was, that it is closed says nothing."""
    address, port, _ = _parts(witness)
    try:
        with socket.create_connection((address, int(port)), timeout=TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False


def _parts(witness: str) -> tuple[str, str, str]:
    where, _, digest = witness.rpartition("/")
    address, _, port = where.rpartition(":")
    return address, port, digest


def _ask(family: int, place: tuple[object, ...], digest: str) -> Proof:
    word = b""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(place)
            while len(word) < _MAX_WORD and (part := sock.recv(_MAX_WORD)):
                word += part
    except ConnectionRefusedError:
        return Proof.CLOSED
    except OSError:
        return Proof.NONE
    return Proof.WORD if word and hmac.compare_digest(_digest(word.decode(errors="replace")), digest) else Proof.NONE
