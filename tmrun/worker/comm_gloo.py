"""Gloo communicators that can be aborted.

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

Sockets = frozenset[tuple[int, str]]
BUILD_TIMEOUT = timedelta(seconds=60)
"""How late a peer may be when communicators are built while training goes on."""
SIGNS = ("gloo/", "Connection closed", "Connection reset", "Broken pipe", "Socket closed", "NCCL")
"""What the text of an error contains that belongs to a lost connection."""


class Gloo(Protocol):
    """What we call of ProcessGroupGloo; torch's annotations leave these methods out."""

    def size(self) -> int:
        """Number of members."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Send one tensor."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Receive one tensor."""

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work: ...


@dataclass(eq=False)
class Communicator:
    """A backend and the sockets it opened."""

    backend: Gloo
    sockets: Sockets = field(default_factory=frozenset)
    certain: bool = True

    def abort(self) -> int:
        """Wake every thread blocked in this communicator; it is unusable from then on. Returns how many connections were cut."""
        return abort(self.sockets)


def build(store: Store, rank: int, size: int, timeout: timedelta) -> Communicator:
    """Connect to all peers. Raises RuntimeError when one does not come; a peer may be late by less than a minute."""
    with Opened() as opened:
        backend = dist.ProcessGroupGloo(store, rank, size, min(timeout, BUILD_TIMEOUT))
    backend._set_default_timeout(timeout)
    return Communicator(cast("Gloo", backend), opened.sockets, opened.certain)


class Opened:
    """The sockets that appeared while something was constructed."""

    _watching: ClassVar[set[Opened]] = set()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.sockets: Sockets = frozenset()
        self.certain = True

    def __enter__(self) -> Opened:
        with self._lock:
            self._watching.add(self)
            if len(self._watching) > 1:
                for each in self._watching:
                    each.certain = False
            self._before = open_sockets()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.sockets = self.so_far()
            self._watching.discard(self)

    def so_far(self) -> Sockets:
        """What has appeared until now."""
        return open_sockets() - self._before


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


def abort(sockets: Iterable[tuple[int, str]]) -> int:
    """Shut TCP connections down, in both directions."""
    return sum(_shut(descriptor, inode) for descriptor, inode in sockets)


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
