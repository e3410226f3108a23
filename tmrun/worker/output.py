"""Where a process's output goes: to a file while it rehearses, to the real descriptors once it is promoted.

Works on descriptors 1 and 2, so that C++ and child processes are caught too. May not know: why.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys


class Redirection:
    """Descriptors 1 and 2 point to ``path`` from ``start`` until ``restore``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._saved: list[int] = []

    def start(self) -> None:
        """Redirect (append to the file)."""
        flush()
        log = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            self._saved.append(os.dup(descriptor))
            os.dup2(log, descriptor)
        os.close(log)

    def restore(self) -> None:
        """Back to where they pointed."""
        if not self._saved:
            return
        flush()
        for descriptor, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)
        self._saved.clear()


def flush() -> None:
    """Write out what Python buffers for stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def flush_everything() -> None:
    """Also every open file of the process: for one that ends without Python's ordinary shutdown."""
    for thing in gc.get_objects():
        # type(), not isinstance(): the latter asks __class__, which lazy module proxies answer with warnings or imports
        if issubclass(type(thing), (io.TextIOWrapper, io.BufferedWriter)) and not thing.closed:
            with contextlib.suppress(OSError, ValueError):
                thing.flush()
    flush()
