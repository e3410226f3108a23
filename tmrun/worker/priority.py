"""Giving way to others while nobody waits for us: a standby rehearses at low CPU and I/O priority and takes a rank at its own.

A process without CAP_SYS_NICE, or a RLIMIT_NICE that allows it, cannot raise its priority again; it then keeps its CPU priority and lowers
that of its I/O only. Linux keeps both a thread. May not know: why.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

_NICER = 5
"""A third of the CPU that others get when all want it: more would starve a rehearsal on a busy machine, and nobody would be warm."""
_CAP_SYS_NICE = 23
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
_IDLE, _AS_CPU = 3 << 13, 0
"""I/O classes: only when nobody else wants the disk; whatever the CPU priority says."""


class Priority:
    """This process's, lowered and restored."""

    def __init__(self) -> None:
        self._own: int | None = None

    def lower(self) -> None:
        """Give way."""
        if self._own is None:
            self._own = os.getpriority(os.PRIO_PROCESS, 0)
            _set(self._own + _NICER if _can_return(self._own) else self._own, _IDLE)

    def restore(self) -> None:
        """As it was."""
        if self._own is not None:
            _set(self._own, _AS_CPU)
            self._own = None


def _set(nice: int, io_class: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for task in _tasks():
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, task, nice)
        if _IOPRIO_SET is not None:
            libc.syscall(_IOPRIO_SET, 1, task, io_class)


def _tasks() -> Iterator[int]:
    """Threads of this process, and its children."""
    for task in Path("/proc/self/task").iterdir():
        yield int(task.name)
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def _can_return(nice: int) -> bool:
    status = Path("/proc/self/status").read_text()
    capabilities = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return bool(capabilities >> _CAP_SYS_NICE & 1) or limit == resource.RLIM_INFINITY or 20 - limit <= nice
