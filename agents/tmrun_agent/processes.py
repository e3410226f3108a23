"""Worker processes: start a group, tell of each end, end them all for certain.

Each worker is a session of its own, dies with the agent, and carries a marker in its environment by which its own children are
found and killed too. May not know: slots' meaning, the store, messages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tmrun import procs

ENV_GROUP = "TMRUN_GROUP"


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker ended and nothing of it is left; ``code`` as a shell shows it."""

    pid: int
    code: int
    error: str


@dataclass
class Processes:
    """The current group's processes. Used by the agent's one thread; ``ended`` is called from waiting threads."""

    ended: Callable[[Ended], None]
    grace_s: float
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _group: str = ""

    def spawn(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Start one process an environment; returns their pids in order. On failure none is left. Raises OSError."""
        self._group = uuid.uuid4().hex
        self._children = []
        try:
            for environment in environments:
                env = {**environment, ENV_GROUP: self._group, "TMRUN_PARENT_PID": str(os.getpid())}
                self._children.append(subprocess.Popen(list(command), env=env, start_new_session=True, stdin=subprocess.DEVNULL))
        except OSError:
            procs.sweep(self._group, ENV_GROUP)
            raise
        for child in self._children:
            waiter = threading.Thread(target=self._wait, args=(child, list(self._children), self._group), name="child-wait", daemon=True)
            waiter.start()
        return tuple(c.pid for c in self._children)

    def kill(self, *, gently: bool) -> None:
        """End the group; returns at once, the ends are told one by one."""
        if not gently:
            self._signal(signal.SIGKILL)
            return
        self._signal(signal.SIGTERM)
        children, group = list(self._children), self._group
        threading.Thread(target=self._later, args=(children, group), name="child-kill", daemon=True).start()

    def close(self) -> bool:
        """Kill whatever is left, grandchildren too. False when something survives (stuck in the kernel)."""
        return not self._group or procs.sweep(self._group, ENV_GROUP)

    def _signal(self, number: int) -> None:
        for child in self._children:
            if child.poll() is None:
                try:
                    os.killpg(child.pid, number)
                except (ProcessLookupError, PermissionError):
                    pass

    def _later(self, children: list[subprocess.Popen[bytes]], marker: str) -> None:
        end = time.monotonic() + self.grace_s
        while time.monotonic() < end and any(c.poll() is None for c in children):
            time.sleep(0.05)
        procs.sweep(marker, ENV_GROUP)

    def _wait(self, child: subprocess.Popen[bytes], group: list[subprocess.Popen[bytes]], marker: str) -> None:
        code = child.wait()
        _reap_session(child.pid)
        if all(c.poll() is not None for c in group):
            while not procs.sweep(marker, ENV_GROUP):  # a process stuck in the kernel keeps the slot: nobody may say that it is free
                time.sleep(1)
        shell_code = code if code >= 0 else 128 - code
        self.ended(Ended(child.pid, shell_code, "" if code >= 0 else f"killed by {signal_name(-code)}"))


def _reap_session(pid: int) -> None:
    """A worker's own children in its process group end with it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def signal_name(number: int) -> str:
    """9 -> SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def bootstrap_command(command: Sequence[str]) -> list[str]:
    """The program that runs a user's script under tmrun."""
    return [os.environ.get("PYTHON_EXEC", sys.executable), "-u", "-m", "tmrun.worker.bootstrap", *command]
