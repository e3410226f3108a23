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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tmrun
from tmrun import procs
from tmrun.core import environment
from tmrun_agent.autopsy import Death, examine, oom_kills, unexamined
from tmrun_agent.logs import WorkerOutput

ENV_GROUP = "TMRUN_GROUP"
_BOOTSTRAP = str(Path(tmrun.__file__).parent / "worker" / "bootstrap.py")


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker ended and nothing of it is left."""

    death: Death


@dataclass(frozen=True, slots=True)
class Worker:
    """What to start."""

    command: Sequence[str]
    environment: Mapping[str, str]
    output: WorkerOutput
    reads: bool = False
    """It has our standard input, which is the launcher's; else there is nothing to read."""


@dataclass
class Processes:
    """The current group's processes. Used by the agent's one thread; ``ended`` is called from waiting threads."""

    ended: Callable[[Ended], None]
    grace_s: float
    held: Sequence[int] = ()
    """Descriptors that every worker inherits."""
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _why: dict[int, str] = field(default_factory=dict)
    """pid -> why it was ended alone."""
    _group: str = ""
    _unattended: tuple[float, list[subprocess.Popen[bytes]], str] | None = None
    """(until, workers, group): their grace period has begun, and no thread could be had that sees to its end."""

    def spawn(self, workers: Sequence[Worker]) -> tuple[int, ...]:
        """Start them all; returns their pids in order. On failure none is left. Raises OSError, RuntimeError (no thread can be had)."""
        self._group = uuid.uuid4().hex
        self._children = []
        kills = oom_kills()
        try:
            for worker in workers:
                self._children.append(self._start(worker))
            for local, (child, worker) in enumerate(zip(self._children, workers, strict=True)):
                examined = partial(examine, output=worker.output, kills_before=kills)
                waiting = (child, local, list(self._children), self._group, examined)
                threading.Thread(target=self._wait, args=waiting, name="child-wait", daemon=True).start()
        except (OSError, RuntimeError):
            procs.sweep(self._group, ENV_GROUP)
            for worker in workers[len(self._children) + 1 :]:  # the one that failed has had its turn
                worker.output.started()
            raise
        return tuple(c.pid for c in self._children)

    def _start(self, worker: Worker) -> subprocess.Popen[bytes]:
        env = {**worker.environment, ENV_GROUP: self._group, "TMRUN_PARENT_PID": str(os.getpid())}
        out, err = worker.output.stdout, worker.output.stderr
        try:
            return subprocess.Popen(
                list(worker.command),
                env=env,
                start_new_session=True,
                stdin=None if worker.reads else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=self.held,
            )
        finally:
            worker.output.started()

    def kill(self, *, gently: bool, number: int = signal.SIGTERM) -> None:
        """End the group; returns at once, the ends are told one by one. ``gently``: with this signal and a grace period first."""
        if not gently:
            self.signal(signal.SIGKILL)
            return
        self.signal(number)
        self._unattended = time.monotonic() + self.grace_s, list(self._children), self._group
        self.tend()

    def tend(self) -> None:
        """Once a turn: a grace period that has begun ends in time, also while this host is out of threads."""
        if self._unattended is None:
            return
        try:
            threading.Thread(target=self._later, args=self._unattended, name="child-kill", daemon=True).start()
        except RuntimeError:
            until, children, _ = self._unattended
            if time.monotonic() < until:
                return
            for child in children:  # what they have started ends after them, by their waiting threads
                _signal(child, signal.SIGKILL)
        self._unattended = None

    def close(self) -> bool:
        """Kill whatever is left, grandchildren too. False when something survives (stuck in the kernel)."""
        return not self._group or procs.sweep(self._group, ENV_GROUP)

    def signal(self, number: int) -> None:
        """Send every worker a signal, and what it started in its process group."""
        for child in self._children:
            _signal(child, number)

    def pass_on(self, number: int) -> None:
        """Send every worker a signal, and nobody else: what it has started may not expect it, and end."""
        for child in self._children:
            if child.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(child.pid, number)

    def signal_one(self, pid: int, number: int, why: str) -> None:
        """The same to one worker, from any thread; it is no process of this group: nothing. ``why``, for people, if it ends."""
        for child in self._children:
            if child.pid == pid:
                self._why[pid] = why
                _signal(child, number)

    def worker_of(self, pid: int) -> int | None:
        """The worker of this group that this process is, or that it comes from; None: it is none of ours. From any thread."""
        workers = {child.pid for child in self._children}
        return next((p for p in procs.lineage(pid) if p in workers), None)

    def _later(self, until: float, children: list[subprocess.Popen[bytes]], marker: str) -> None:
        while time.monotonic() < until and any(c.poll() is None for c in children):
            time.sleep(0.05)
        procs.sweep(marker, ENV_GROUP)

    def _wait(
        self,
        child: subprocess.Popen[bytes],
        local: int,
        group: list[subprocess.Popen[bytes]],
        marker: str,
        examined: Callable[[int, int, int, str], Death],
    ) -> None:
        code = child.wait()
        try:
            death = examined(child.pid, local, code, self._why.pop(child.pid, ""))
        except Exception as error:  # it reads what a script wrote; the end is told whatever that is, else its slot is never free
            death = unexamined(child.pid, local, code, error)
        _reap_session(child.pid)
        if all(c.poll() is not None for c in group):
            while not procs.sweep(marker, ENV_GROUP):  # a process stuck in the kernel keeps the slot: nobody may say that it is free
                time.sleep(1)
        self.ended(Ended(death))


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)


def _reap_session(pid: int) -> None:
    """A worker's own children in its process group end with it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def worker_command(command: Sequence[str], local_rank: int, *, no_python: bool) -> list[str]:
    """The program that runs a user's script, module or program under tmrun."""
    how = ["--exec"] if no_python else []
    return [os.environ.get("PYTHON_EXEC", sys.executable), "-u", _BOOTSTRAP, *how, *environment.worker_command(command, local_rank)]
