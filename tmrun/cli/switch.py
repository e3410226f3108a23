"""The C++ switch for process groups: compiled beside the job, once a machine, if it is not there yet.

Nobody waits for it: workers that find it when they start use it, the others switch in Python. Where it cannot be compiled, one line says
so. ``TMRUN_SWITCH=slot`` does without. May not know: torch, what the switch does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

from tmrun import wire
from tmrun.worker import shim_cache


def build_beside(stack: ExitStack) -> None:
    """Begin, unless it is cached or not wanted; the end of ``stack`` ends it."""
    if os.environ.get(shim_cache.ENV_SWITCH, "auto") == "slot" or shim_cache.path().exists():
        return
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    environment = {**os.environ, wire.ENV_PARENT: str(os.getpid())}
    command = [python, "-m", "tmrun.worker.shim", "--beside"]
    child = subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)
    stack.callback(_end, child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)  # the compiler too
    child.wait()
