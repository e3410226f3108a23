"""Where this host is: addresses of its own, which one routes to the store, whether a store answers.

May not know: jobs.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import ipaddress
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

from tmrun.core.errors import UsageError
from tmrun.store.endpoints import TlsFiles, endpoints

DEFAULT_PORT = 29400


def split_endpoint(text: str) -> tuple[str, int]:
    """``host[:port]`` or ``[v6]:port`` -> (host, port); torchrun's default port. Raises UsageError."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint {text!r}: {error}; write HOST:PORT, IPv6 as [ADDR]:PORT") from None
    if not host or parts.path:
        raise UsageError(f"--rdzv-endpoint {text!r}: write HOST:PORT")
    return host, port or DEFAULT_PORT


def is_loopback(host: str) -> bool:
    """True when only this machine can reach the name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listens(host: str, port: int) -> bool:
    """True when something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def answers(store_url: str, tls: TlsFiles | None = None, *, quorum: bool = True) -> bool:
    """True when an etcd answers there; ``quorum``: and can serve. Raises ssl.SSLError when it does not take our certificate."""
    parts = urlsplit(store_url)
    connection: http.client.HTTPConnection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=1)
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=1, context=_context(tls or TlsFiles()))
    try:
        connection.request("GET", "/health")
        healthy = json.loads(connection.getresponse().read()).get("health") == "true"
        return healthy or not quorum
    except ssl.SSLError:
        raise
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _context(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca))
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


@contextmanager
def one_starter(port: int) -> Iterator[None]:
    """Only one process of this machine at a time is inside. The kernel frees an abstract socket name whatever happens."""
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0tmrun-store-{port}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.05)
        yield


def free_name(job: str, name: str, stack: ExitStack) -> str:
    """This name, or with a number behind it where another launcher of this machine has it; held until ``stack`` ends."""
    number = 0
    while True:
        chosen = name if number == 0 else f"{name}-{number}"
        held = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            held.bind(f"\0tmrun-node-{os.getuid()}-{_digest(job, chosen)}")
            return chosen
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        number += 1


def _digest(job: str, name: str) -> str:
    """Of both; a socket's name has room for 107 bytes, a job's id and a host's name may have more."""
    return hashlib.sha256(f"{job}\0{name}".encode()).hexdigest()[:32]


def is_local(host: str) -> bool:
    """True when one of the name's addresses belongs to this machine: only then can it be bound. Unknown names are not local."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_bindable(info[0], str(info[4][0])) for info in infos)


def _bindable(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address(wanted: str | None, store: str) -> str:
    """How other hosts reach this one: as told, else the source address of the route to the store. Nothing is sent."""
    if wanted:
        return wanted
    host, _, port = endpoints(store).addresses[0].rpartition(":")
    host = host.strip("[]")
    try:
        family, _, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"no route to the store at {host}: {error.strerror}; give this host's address with --local-addr") from None
    return str(ipaddress.ip_address(found.partition("%")[0]))
