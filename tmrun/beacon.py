"""A page of memory that a worker writes and its agent reads: where the worker is, and that it lives.

The agent must be able to judge a worker that cannot answer (frozen, or with its GIL held), so nothing here needs the worker's help:
a file in the runtime folder, mapped by both. Every field is one aligned machine word, written at once; there is no lock, and a reader may
see fields of two neighbouring moments. May not know: what follows from what is read, torch.
"""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

from tmrun.core.watchdog import Place, Reading

ENV_BEACON = "TMRUN_BEACON"
"""Path of the page."""

DUMP_SIGNAL = signal.SIGRTMIN + 11
"""Makes a worker whose beacon says ``dumps`` write the stacks of all its threads; scripts use the classic signals for themselves."""
_FIELDS = ("ticks", "place", "epoch", "step", "operations", "dumps", "counted", "wall_ns", "busy_ns", "proven_ns", "cut", "compiling")
_AT = {name: at for at, name in enumerate(_FIELDS)}
_SIZE = 8 * len(_FIELDS)


class Beacon:
    """The page, mapped. ``create`` by the agent before it starts the worker, ``attach`` by the worker."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._words = memoryview(memory).cast("q")

    @staticmethod
    def create(path: Path) -> Beacon:
        """A new, empty page; one that another worker may still have mapped stays what it is. Raises OSError."""
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, _SIZE)  # a hole that the disk has no room for would kill whoever writes into it
            return Beacon(mmap.mmap(file.fileno(), _SIZE))

    @staticmethod
    def attach(path: str | None) -> Beacon:
        """The page at ``path``; without one (tests, no agent) a page that nobody reads."""
        if not path:
            return Beacon(bytearray(_SIZE))
        with open(path, "r+b") as file:
            return Beacon(mmap.mmap(file.fileno(), _SIZE))

    def get(self, field: str) -> int:
        """One field."""
        return self._words[_AT[field]]

    def set(self, field: str, value: int) -> None:
        """Write one field."""
        self._words[_AT[field]] = value

    def add(self, field: str, value: int = 1) -> None:
        """Count a field up; each has one writer."""
        self._words[_AT[field]] += value

    def reading(self, *, stopped: bool) -> Reading:
        """What the watchdog looks at."""
        word = self._words
        place, epoch, step, operations, ticks = (word[_AT[name]] for name in ("place", "epoch", "step", "operations", "ticks"))
        return Reading(Place(place), epoch, step, operations, ticks, stopped, bool(word[_AT["compiling"]]))


def dump_path(beacon: Path) -> Path:
    """Where the worker with this beacon writes the stacks of its threads."""
    return beacon.with_suffix(".stacks")
