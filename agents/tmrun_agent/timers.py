"""torch's file timer: a worker says by when it will have left a block of code, and is ended when it has not.

The worker's side is torch's own ``torch.distributed.elastic.timer.FileTimerClient``, which writes requests into the named pipe
``$TORCHELASTIC_TIMER_FILE``; as under torchrun there is one where ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` asks for it. torchrun's agent ends
itself with the worker; here the worker's end is a failure like any other, and says which timer ran out. A process that a worker started
(a DataLoader's) can set timers too: torchrun ends that one, and with its agent all; here it costs the worker that it belongs to.
May not know: slots, the store, what follows.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tmrun import procs

_ENV_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
ENV_FILE = "TORCHELASTIC_TIMER_FILE"
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Request:
    """As torch's client writes it: ``expires`` in seconds of the wall clock, negative: the block was left."""

    pid: int
    scope: str
    expires: float
    signal: int


def parse(line: str) -> Request | None:
    """One line of the pipe; None: it is not a request."""
    try:
        found = json.loads(line)
        return Request(int(found["pid"]), str(found["scope_id"]), float(found["expiration_time"]), int(found["signal"]))
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Timer:
    """One that runs. ``worker``: whom it ends; ``born``: when the process that set it began, for its pid may be another one's some day."""

    request: Request
    worker: int
    born: int

    @property
    def reason(self) -> str:
        """Which it is."""
        asked = self.request
        return f"its timer {asked.scope!r}" if asked.pid == self.worker else f"the timer {asked.scope!r} of its process {asked.pid}"


Timers = Mapping[tuple[int, str], Timer]
"""By the process that set it and its scope."""


def expired(timers: Timers, now: float) -> dict[int, Timer]:
    """worker -> the first of its timers that ran out and names a signal."""
    late = [t for t in timers.values() if t.request.expires <= now and t.request.signal > 0]
    return {t.worker: t for t in sorted(late, key=lambda t: t.request.expires, reverse=True)}


def from_environment(
    path: Path, end: Callable[[int, int, str], None], parked: Callable[[int], bool], worker_of: Callable[[int], int | None]
) -> FileTimers | None:
    """Begin to listen, if the user asks for that. Raises OSError."""
    if os.environ.get(_ENV_ENABLE) != "1":
        return None
    found = FileTimers(path, end, parked, worker_of)
    found.start()
    return found


@dataclass
class FileTimers:
    """``end``: sends a worker of this node a signal, for a reason; ``parked``: whether it waits for a decision of ours, which no timer
    counts; ``worker_of``: the worker that a process is or comes from, None: it is no process of this node. All are called from a thread."""

    path: Path
    end: Callable[[int, int, str], None]
    parked: Callable[[int], bool]
    worker_of: Callable[[int], int | None]
    _looked: float = 0.0
    _timers: Timers = field(default_factory=dict)

    def start(self) -> None:
        """Make the pipe and listen. Raises OSError."""
        self.path.unlink(missing_ok=True)  # of an agent that was killed and started again
        os.mkfifo(self.path, 0o600)
        fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)  # also for writing: it never comes to its end
        threading.Thread(target=self._run, args=(fd,), name="file-timers", daemon=True).start()

    def _run(self, fd: int) -> None:
        rest = b""
        while True:
            if select.select([fd], [], [], LOOK_S)[0]:
                *lines, rest = (rest + os.read(fd, 1 << 16)).split(b"\n")
                for request in filter(None, (parse(line.decode(errors="replace")) for line in lines)):
                    self._take(request)
            self._enforce(time.time())

    def _take(self, request: Request) -> None:
        """Begin or end one."""
        rest = {key: timer for key, timer in self._timers.items() if key != (request.pid, request.scope)}
        worker, seen = self.worker_of(request.pid), procs.look(request.pid)
        if request.expires >= 0 and worker is not None and seen is not None:
            rest[request.pid, request.scope] = Timer(request, worker, seen.born)
        self._timers = rest

    def _enforce(self, now: float) -> None:
        waited, self._looked = now - (self._looked or now), now
        self._timers = {key: self._later(t, waited) for key, t in self._timers.items() if _lives(t)}
        for worker, timer in expired(self._timers, now).items():
            self._timers = {key: t for key, t in self._timers.items() if t.worker != worker}
            self.end(worker, timer.request.signal, f"{timer.reason} ran out {now - timer.request.expires:.1f} s ago")

    def _later(self, timer: Timer, waited: float) -> Timer:
        if not self.parked(timer.worker):
            return timer
        return replace(timer, request=replace(timer.request, expires=timer.request.expires + waited))


def _lives(timer: Timer) -> bool:
    """Who set it is still there to be late."""
    seen = procs.look(timer.request.pid)
    return seen is not None and not seen.ended and seen.born == timer.born
