"""Gloo communicators that can be built in the background and aborted.

Gloo has no abort: a rank blocked on a peer that is frozen or unreachable stays blocked until the timeout. Shutting the group's TCP
connections for reading, from another thread, lets gloo find their end, close them and tell whoever waits to receive. Not for writing as
well: a send that meets a connection shut for writing before gloo has found its end is never told of it, and hangs until the timeout.
The same happens to a send that was half done, or that meets a connection which a dying peer has just reset. So when nothing moves any
more (``quiet``), what has not ended never will; the C++ switch then gives it up, without it the process has to end (``stuck``).

Which connections belong to a group is found by comparing the process's sockets before and after its construction; a socket is remembered
by descriptor *and* inode, for descriptors are reused. Listeners are never touched (gloo would call std::terminate), nor are unix sockets
(the agent). Two constructions at the same time (user code makes a group while a migration is prepared) see each other's sockets: both
are then marked as not ``certain``; they may be cut in a crash, where both are replaced, but not to tidy up. A TCP connection that user
code itself opens on another thread during the few milliseconds of a construction would be taken for the group's.
May not know: migrations, torch's process group objects.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

if TYPE_CHECKING:
    from tmrun.worker.comm import Like

Sockets = frozenset[tuple[int, str]]
BUILD_TIMEOUT = timedelta(seconds=60)
"""How late a peer may be when communicators are built while training goes on."""
_MOMENT_S = 0.05
NAME = "gloo"
TYPE = dist.ProcessGroup.BackendType.GLOO
QUEUED = False
MISUSE: tuple[str, ...] = ()
SIGNS: tuple[str, ...] = ("gloo/", "Connection closed", "Connection reset", "Broken pipe", "Socket closed")


@dataclass(frozen=True)
class Connections:
    """The sockets of one communicator, and its threads (by kernel id). ``certain``: all of them are its own."""

    sockets: Sockets = field(default_factory=frozenset)
    certain: bool = True
    threads: frozenset[int] = frozenset()
    on_device: ClassVar[bool] = False

    def abort(self) -> int:
        """See ``comm.Connection``."""
        return self._shut(socket.SHUT_RD)

    def close(self) -> int:
        """See ``comm.Connection``."""
        return self._shut(socket.SHUT_RDWR)

    def quiet(self) -> bool:
        """Whether none of its threads runs or wants to, now and a moment later."""
        before = cpu_times(self.threads)
        time.sleep(_MOMENT_S)
        return None not in before and before == cpu_times(self.threads)

    def vacate(self) -> None:
        """It takes no device's memory."""

    def _shut(self, how: int) -> int:
        return sum(_shut(descriptor, inode, how) for descriptor, inode in self.sockets)


def build(store: Store, rank: int, size: int, timeout: timedelta, like: Like) -> tuple[Any, Connections]:
    """See ``comm.Kind``."""
    with Opened() as opened:
        backend = dist.ProcessGroupGloo(store, rank, size, min(timeout, BUILD_TIMEOUT))
    backend._set_default_timeout(timeout)
    return backend, opened.made


def making() -> Opened:
    """See ``comm.Kind``."""
    return Opened()


def warm(like: Like) -> None:
    """There is nothing to load."""


class Opened:
    """The sockets that appeared while something was constructed."""

    _watching: ClassVar[set[Opened]] = set()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.made = Connections()
        self._certain = True

    def __enter__(self) -> Opened:
        with self._lock:
            self._watching.add(self)
            if len(self._watching) > 1:
                for each in self._watching:
                    each._certain = False
            self._before = open_sockets()
            self._threads = _threads()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.made = Connections(open_sockets() - self._before, self._certain, _threads() - self._threads)
            self._watching.discard(self)

    def connection(self, backend: Any) -> Connections:
        """See ``comm.Making``."""
        return self.made

    def abort(self) -> int:
        """Shut what has appeared until now."""
        return Connections(open_sockets() - self._before).close()


def open_sockets() -> Sockets:
    """(descriptor, inode) of every socket of this process."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add((int(descriptor.name), target))
    return frozenset(found)


def _threads() -> frozenset[int]:
    return frozenset(int(task.name) for task in Path("/proc/self/task").iterdir())


def cpu_times(threads: Iterable[int]) -> list[tuple[str, str] | None]:
    """Of each thread that sleeps, what it has used so far; None for one that does not sleep."""
    found: list[tuple[str, str] | None] = []
    for thread in sorted(threads):
        try:
            state, *numbers = Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        found.append((numbers[10], numbers[11]) if state == "S" else None)
    return found


def _shut(descriptor: int, inode: str, how: int) -> bool:
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return False
    if str(Path(f"/proc/self/fd/{duplicate}").readlink()) != inode:  # the number is another file's by now, maybe not even a socket's
        os.close(duplicate)
        return False
    with socket.socket(fileno=duplicate) as connection:
        try:
            if not _is_connection(connection):
                return False
            connection.shutdown(how)
        except OSError:
            return False
    return True


def _is_connection(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
