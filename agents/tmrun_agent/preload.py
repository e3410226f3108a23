"""A standby of a script that cannot be rehearsed reads what the script imports, once, in the background.

May not know: why this node has no ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tmrun

AFTER_S = 20.0
"""Scripts that can be rehearsed have usually shown it by then, and a rehearsal warms more."""
_PRELOAD = str(Path(tmrun.__file__).parent / "worker" / "preload.py")


@dataclass
class Preload:
    """``target``: script, or -m and a module. ``tend`` is called all the time."""

    target: Sequence[str]
    _since: float = field(default=-1.0)
    _process: subprocess.Popen[bytes] | None = None

    def tend(self, idle: bool, now: float) -> None:
        """``idle``: the job runs, and this node has nothing to do. ``now``: monotonic seconds."""
        if self._process is not None:
            self._process.poll()
            return
        if not idle:
            self._since = -1.0
            return
        self._since = now if self._since < 0 else self._since
        if now - self._since >= AFTER_S:
            argv = [os.environ.get("PYTHON_EXEC", sys.executable), _PRELOAD, *self.target]
            quiet = subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
            except OSError:
                self._since = now  # it is only a help; later, perhaps

    def close(self) -> None:
        """It is of no use any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
