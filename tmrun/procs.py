"""Processes that certainly end: tie a child to its parent, find and kill everything that belongs to a launch.

Every process of a launch inherits ``TMRUN_MARKER`` in its environment, so that also grandchildren in sessions of their own are found,
and nothing else ever is. Linux only (/proc, prctl). May not know: what the processes do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ENV_MARKER = "TMRUN_MARKER"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent ends; exits at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, so that they can be reaped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own: set[int]) -> None:
    """Collect the exit status of adopted orphans that ended, so that no zombie stays; ``own`` children are left to their Popen."""
    for pid in children() - own:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def children(pid: int | None = None) -> set[int]:
    """Pids of a process's children, adopted ones too; None: of this one. Raises OSError when there is no such process."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except OSError:
            continue  # the thread ended meanwhile
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """What the kernel says of a process. ``state``: R running, S sleeping, D in a system call that cannot be interrupted, T or t stopped,
    Z ended, and not waited for yet; ``born``: in clock ticks since the machine started, so that (pid, born) is never another process."""

    state: str
    parent: int
    session: int
    born: int

    @property
    def ended(self) -> bool:
        """It does nothing any more."""
        return self.state in ("X", "Z")


def look(pid: int) -> Seen | None:
    """None: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].decode().split()
    except OSError:
        return None
    return Seen(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def lineage(pid: int) -> Iterator[int]:
    """A process, whoever leads its session, what started it, and so on: where it is from, also when what started it has ended."""
    while (seen := look(pid)) is not None:
        yield pid
        yield seen.session
        pid = seen.parent


def marked(value: str, variable: str = ENV_MARKER) -> list[int]:
    """Pids, but for this process, whose initial environment holds variable=value exactly. Zombies are left out."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def sweep(value: str, variable: str = ENV_MARKER, deadline_s: float = 10.0) -> bool:
    """SIGKILL everything marked until nothing is left. False: something survived the deadline (stuck in the kernel)."""
    end = time.monotonic() + deadline_s
    while pids := marked(value, variable):
        if time.monotonic() > end:
            return False
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)
    return True
