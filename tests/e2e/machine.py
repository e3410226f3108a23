"""What only a machine can do to a process: its disk is full, its memory is used up.

Needs root, a tmpfs that may be mounted and a memory cgroup that may be made; ``Denied`` where they are not.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e_lab import wait_for

_ROOMS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


class Denied(Exception):
    """This machine does not allow it; says what."""


@contextmanager
def small_disk(parent: Path, size: str) -> Iterator[Path]:
    """A file system of this size, below ``parent``. Raises Denied."""
    folder = parent / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=False).returncode:
        raise Denied("needs a tmpfs that may be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def full(disk: Path | None) -> Iterator[None]:
    """Nothing more fits on it, inside the block. Raises Denied when there is none."""
    if disk is None:
        raise Denied("needs a tmpfs that may be mounted")
    fill(disk)
    try:
        yield
    finally:
        (disk / "filler").unlink()


def fill(disk: Path) -> None:
    """To the last byte, with a file ``filler``."""
    with open(disk / "filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1 << 12))
        except OSError:
            pass


def new_cgroup(name: str) -> Path:
    """A memory cgroup of version 1 or 2. Raises Denied."""
    for root, limit in zip(_ROOMS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        try:
            (root / name).mkdir()
        except OSError:
            continue
        if (root / name / limit).exists():
            return root / name
        (root / name).rmdir()
    raise Denied("needs a memory cgroup that may be made")


def enter(group: Path, pids: Iterable[int]) -> None:
    """These processes belong to it from now on, as do their children to come."""
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))


def give(group: Path, megabytes: int) -> None:
    """So much memory and no more than its processes have now."""
    used = next(group / n for n in ("memory.usage_in_bytes", "memory.current") if (group / n).exists())
    limit = next(group / n for n in ("memory.limit_in_bytes", "memory.max") if (group / n).exists())
    limit.write_text(str(int(used.read_text()) + (megabytes << 20)))


def remove(group: Path) -> None:
    """Once its processes have ended."""
    wait_for(f"{group.name} empty", lambda: not (group / "cgroup.procs").read_text(), 30)
    group.rmdir()


@contextmanager
def no_memory(pids: Iterable[int], megabytes: int) -> Iterator[None]:
    """These processes, and what they start, get so much more and then no more, inside the block. Raises Denied."""
    group = new_cgroup(f"tmrun-test-{os.getpid()}")
    try:
        enter(group, pids)
        give(group, megabytes)
        yield
    finally:
        enter(group.parent, [int(pid) for pid in (group / "cgroup.procs").read_text().split()])
        remove(group)
