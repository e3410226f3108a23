"""Gloo communicators that can be built in the background and aborted.

Gloo has no abort: a rank blocked on a peer that is frozen or unreachable stays blocked until the timeout. Shutting the group's TCP
connections down from another thread wakes it at once with an error. Which connections belong to a group is found by comparing the
process's sockets before and after its construction; a socket is remembered by descriptor *and* inode, for descriptors are reused.
Listeners are never touched (gloo would call std::terminate), nor are unix sockets (the agent). Two constructions at the same time (user
code makes a group while a migration is prepared) see each other's sockets: both are then marked as not ``certain``; they may be cut in a
crash, where both are replaced, but not to tidy up. A TCP connection that user code itself opens on another thread during the few
milliseconds of a construction would be taken for the group's.
May not know: migrations, torch's process group objects.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

Sockets = frozenset[tuple[int, str]]
BUILD_TIMEOUT = timedelta(seconds=60)
"""How late a peer may be when communicators are built while training goes on."""
NAME = "gloo"
SIGNS: tuple[str, ...] = ("gloo/", "Connection closed", "Connection reset", "Broken pipe", "Socket closed")


@dataclass(frozen=True)
class Connections:
    """The sockets of one communicator. ``certain``: all of them are its own."""

    sockets: Sockets = field(default_factory=frozenset)
    certain: bool = True

    def abort(self) -> int:
        """Shut them down, in both directions; whoever is blocked wakes up with an error. Returns how many were cut."""
        return sum(_shut(descriptor, inode) for descriptor, inode in self.sockets)


def build(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[Any, Connections]:
    """See ``comm.Kind``."""
    with Opened() as opened:
        backend = dist.ProcessGroupGloo(store, rank, size, min(timeout, BUILD_TIMEOUT))
    backend._set_default_timeout(timeout)
    return backend, opened.made


def making() -> Opened:
    """See ``comm.Kind``."""
    return Opened()


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
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.made = Connections(open_sockets() - self._before, self._certain)
            self._watching.discard(self)

    def abort(self) -> int:
        """Shut what has appeared until now."""
        return Connections(open_sockets() - self._before).abort()


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


def _shut(descriptor: int, inode: str) -> bool:
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with duplicate:
        try:
            if str(Path(f"/proc/self/fd/{duplicate.fileno()}").readlink()) != inode or not _is_connection(duplicate):
                return False
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def _is_connection(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
