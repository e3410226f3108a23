"""torch's file timer: a worker says by when it will have left a block of code, and is ended when it has not.

The worker's side is torch's own ``torch.distributed.elastic.timer.FileTimerClient``, which writes requests into the named pipe
``$TORCHELASTIC_TIMER_FILE``; as under torchrun there is one where ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` asks for it. torchrun's agent ends
itself with the worker; here the worker's end is a failure like any other, and says which timer ran out.
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


def fold(timers: Mapping[tuple[int, str], Request], request: Request) -> dict[tuple[int, str], Request]:
    """Begin or end one."""
    rest = {key: timer for key, timer in timers.items() if key != (request.pid, request.scope)}
    return rest if request.expires < 0 else {**rest, (request.pid, request.scope): request}


def expired(timers: Mapping[tuple[int, str], Request], now: float) -> dict[int, Request]:
    """pid -> the first of its timers that ran out and names a signal."""
    late = sorted((t for t in timers.values() if t.expires <= now and t.signal > 0), key=lambda t: t.expires, reverse=True)
    return {timer.pid: timer for timer in late}


def from_environment(path: Path, end: Callable[[int, int, str], None], parked: Callable[[int], bool]) -> FileTimers | None:
    """Begin to listen, if the user asks for that. Raises OSError."""
    if os.environ.get(_ENV_ENABLE) != "1":
        return None
    found = FileTimers(path, end, parked)
    found.start()
    return found


@dataclass
class FileTimers:
    """``end``: sends a worker of this node a signal, for a reason; ``parked``: whether it waits for a decision of ours, which no timer
    counts. Both are called from a thread."""

    path: Path
    end: Callable[[int, int, str], None]
    parked: Callable[[int], bool]
    _looked: float = 0.0
    _timers: dict[tuple[int, str], Request] = field(default_factory=dict)

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
                    self._timers = fold(self._timers, request)
            self._enforce(time.time())

    def _enforce(self, now: float) -> None:
        waited, self._looked = now - (self._looked or now), now
        self._timers = {k: replace(t, expires=t.expires + waited) if self.parked(t.pid) else t for k, t in self._timers.items()}
        for pid, timer in expired(self._timers, now).items():
            self._timers = {key: t for key, t in self._timers.items() if t.pid != pid}
            self.end(pid, timer.signal, f"its timer {timer.scope!r} ran out {now - timer.expires:.1f} s ago")
