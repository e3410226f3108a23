"""Where this host is: addresses of its own, which one routes to the store, whether a store answers.

May not know: jobs.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tmrun.core.errors import UsageError
from tmrun.store.endpoints import bracketed, endpoints

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


def url(host: str, port: int) -> str:
    """An endpoint for the store layer."""
    return f"http://{bracketed(host)}:{port}"


def answers(store_url: str) -> bool:
    """True when an etcd answers there."""
    parts = urlsplit(store_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=1)
    try:
        connection.request("GET", "/health")
        return b"health" in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def one_starter(port: int) -> Iterator[None]:
    """Only one process of this machine at a time is inside. The kernel frees an abstract socket name whatever happens."""
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0tmrun-store-{port}")
                break
            except OSError:
                time.sleep(0.05)
        yield


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
