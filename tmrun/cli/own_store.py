"""Where a launch gets its store: one that exists, or an embedded etcd that this host, or three hosts, run for the job.

An embedded store that listens beyond loopback is secured by the job's secret (mutual TLS); without one it is refused.
May not know: jobs, agents.
"""

from __future__ import annotations

import queue
import signal
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import click

from tmrun.cli import place
from tmrun.config import StoreAccess
from tmrun.core.errors import Interrupted, StoreError, UsageError
from tmrun.core.plural import many
from tmrun.store import access
from tmrun.store.embedded import Cluster, EmbeddedEtcd, free_ports
from tmrun.store.endpoints import TlsFiles, bracketed
from tmrun.store.secret import issue

_READY_S = 30.0
_MAX_RESTARTS = 5
_ROW_S = 300.0
"""An etcd that ends more often than ``_MAX_RESTARTS`` times in so long will not run; one that is killed now and then over weeks will."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Choice:
    """``existing``: use this one. Else ``endpoints``: the hosts that run the store, none: this machine alone, ``members`` of them."""

    existing: StoreAccess | None = None
    endpoints: tuple[tuple[str, int], ...] = ()
    members: int = 1
    secret: str = ""
    insecure: bool = False

    def check(self) -> None:
        """Raises UsageError."""
        if self.members not in (1, 3, 5):
            raise UsageError(f"--etcd-members {self.members}: 1, 3 or 5 (an even number survives no more losses than one less)")
        if self.endpoints and len(self.endpoints) != self.members:
            raise UsageError(
                f"--rdzv-endpoint names {many(len(self.endpoints), 'host')} for --etcd-members {self.members}: name one a member"
            )
        exposed = [h for h, _ in self.endpoints if not place.is_loopback(h)]
        if exposed and not self.secret and not self.insecure:
            raise UsageError(
                f"the store on {exposed[0]} would be open to anybody: give every host the same secret (--secret-file FILE or "
                f"${access.ENV_SECRET}, e.g. from `openssl rand -hex 16`), or --insecure on a network that you trust"
            )


@dataclass
class OwnStore:
    """Access to the store, and the etcds that this process runs for it."""

    access: StoreAccess
    members: list[EmbeddedEtcd] = field(default_factory=list)
    hosts: int = 0
    """How many hosts run the store, if this one is one of them and others are elsewhere; 0 else."""
    clock: Callable[[], float] = time.monotonic
    _ends: list[float] = field(default_factory=list)

    def tend(self) -> str:
        """Start an etcd of ours that ended again; what to tell about it. Raises StoreError when it keeps ending."""
        for member in self.members:
            code = member.exit_code()
            if code is None:
                continue
            now = self.clock()
            self._ends = [*(end for end in self._ends if now - end < _ROW_S), now]
            if len(self._ends) > _MAX_RESTARTS:
                often = f"{len(self._ends)} times in {_ROW_S:.0f} s"
                raise StoreError(f"the embedded etcd ended {often}, last with exit code {code}; it is given up")
            member.restart()
            return f"the store ended (exit code {code}) and was started again on its data; training goes on"
        return ""


def provide(choice: Choice, folder: Path, stack: ExitStack, interrupts: queue.SimpleQueue[int], timeout_s: float) -> OwnStore:
    """Have a store; what this process has to run for it ends with ``stack``. Raises UsageError, StoreError, Interrupted."""
    if choice.existing is not None:
        return OwnStore(choice.existing)
    tls = issue(choice.secret, folder / "tls", [h for h, _ in choice.endpoints]) if choice.secret else None
    if not choice.endpoints:
        return _local(choice.members, folder, stack, tls)
    scheme = "https" if tls else "http"
    urls = [f"{scheme}://{bracketed(h)}:{p}" for h, p in choice.endpoints]
    own = OwnStore(access.with_tls(",".join(urls), tls))
    for index, (host, port) in enumerate(choice.endpoints):
        if place.is_local(host):
            own.members += _run_member(choice, index, urls[index], host, port, folder, stack, tls)
    _wait(urls, tls, interrupts, timeout_s)
    if own.members and not any(place.is_loopback(host) for host, _ in choice.endpoints):
        own.hosts = len(choice.endpoints)
    return own


def _local(members: int, folder: Path, stack: ExitStack, tls: TlsFiles | None) -> OwnStore:
    if members == 1:
        single = stack.enter_context(EmbeddedEtcd(folder / "etcd", tls=tls))
        return OwnStore(access.with_tls(single.url, tls), [single])
    ports = free_ports(_LOOPBACK, 2 * members)
    peers = tuple(f"{_LOOPBACK}:{p}" for p in ports[members:])
    running = [
        stack.enter_context(EmbeddedEtcd(folder / f"etcd{i}", _LOOPBACK, ports[i], tls=tls, cluster=Cluster(i, peers)))
        for i in range(members)
    ]
    for member in running:
        member.wait_ready(_READY_S)
    return OwnStore(access.with_tls(",".join(m.url for m in running), tls), running)


def _run_member(
    choice: Choice, index: int, url: str, host: str, port: int, folder: Path, stack: ExitStack, tls: TlsFiles | None
) -> list[EmbeddedEtcd]:
    """Run this endpoint's etcd, unless another launcher of this machine does."""
    with place.one_starter(port):
        if place.listens(host, port) and place.answers(url, tls, quorum=False):
            return []
        cluster = None
        if choice.members > 1:
            cluster = Cluster(index, tuple(f"{bracketed(h)}:{p + 1}" for h, p in choice.endpoints))
        click.echo(f"tmrun: this host runs the store of the job, at {url}", err=True)
        return [stack.enter_context(EmbeddedEtcd(folder / f"etcd{index}", host, port, tls=tls, cluster=cluster))]


def interrupted(number: int) -> Interrupted:
    """The error that this signal's arrival is."""
    return Interrupted(number, signal.Signals(number).name)


def _wait(urls: list[str], tls: TlsFiles | None, interrupts: queue.SimpleQueue[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    told = False
    while not any(_answers(u, tls) for u in urls):
        if not told:
            click.echo(f"tmrun: waiting for the store at {', '.join(urls)}", err=True)
        told = True
        if not interrupts.empty():
            raise interrupted(interrupts.get())
        if time.monotonic() > deadline:
            where = ", ".join(urls)
            raise StoreError(f"no store answered at {where} within {timeout_s:g} s; does the host with that address run the same command?")
        time.sleep(0.3)


def _answers(url: str, tls: TlsFiles | None) -> bool:
    try:
        return place.answers(url, tls)
    except ssl.SSLError as error:
        raise StoreError(f"the store at {url} refused this host ({error.reason}): is the job's secret the same on every host?") from None
