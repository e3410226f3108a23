"""Where workers write: the console, files in torchrun's layout, or both; and what they said last.

    <log_dir>/<job>_<node>_<random>/attempt_<restarts>/<local rank>/{stdout.log,stderr.log,error.json}

A worker writes into its file itself, and a thread here copies new lines to the console: an agent that hangs never blocks a worker. Only
stderr that goes to a console which is no terminal passes through a pipe, for its last lines. Nothing is ever deleted or overwritten.
May not know: why a worker ended.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import tempfile
import termios
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import BinaryIO

from tmrun.core.keys import MAX_NAME, name_of
from tmrun.core.streams import ERR, OUT, Output

TAIL_LINES = 20
_TAIL_BYTES = 16 << 10
_POLL_S = 0.1
_DRAIN_S = 2.0
"""A process that was not ours may still hold the pipe."""
_PIPE_BYTES = 1 << 20
_LINE_BYTES = 1 << 20
"""A longer line is broken."""
_STILL_S = 1.0
_ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")
_NAMES = {OUT: "stdout", ERR: "stderr"}


@dataclass
class WorkerOutput:
    """One worker's descriptors for Popen (None: as ours), and its traces."""

    error_file: str
    folder: str
    """Of its files; empty when none are kept."""
    stdout: int | None = None
    stderr: int | None = None
    _tail: Callable[[], tuple[str, ...]] = tuple

    def started(self) -> None:
        """The worker has its own copies of the descriptors."""
        for descriptor in (self.stdout, self.stderr):
            if descriptor is not None:
                os.close(descriptor)

    def tail(self) -> tuple[str, ...]:
        """The last lines on stderr, as far as they pass through here."""
        return self._tail()


@dataclass
class Logs:
    """The outputs of one agent's workers, group by group."""

    wanted: Output
    job: str
    node: str
    scratch: Path
    """For error files where no logs are wished."""
    tell: Callable[[str], None]
    """An event for people."""
    moved: Callable[[str], None]
    """The workers now write below another folder."""
    _run: Path | None = None
    _groups: int = 0
    _followers: list[Follower | Pump] = field(default_factory=list)
    _late: list[Follower | Pump] = field(default_factory=list)
    """Of earlier groups, which still copy."""

    def open(self, restarts: int, prefixes: Sequence[str]) -> list[WorkerOutput]:
        """Outputs of a new group, one a worker; ``prefixes`` of their tee'd lines. Without files where none can be written."""
        self.close(_DRAIN_S)
        self._groups += 1
        try:
            return self._open(restarts, prefixes)
        except OSError as error:
            self.tell(f"{self.node}: no logs can be written ({error}); its workers write to the console only")
            self.close(_DRAIN_S)
            self.wanted = replace(self.wanted, log_dir=os.devnull)
            return self._open(restarts, prefixes)

    def _open(self, restarts: int, prefixes: Sequence[str]) -> list[WorkerOutput]:
        folder = self._folder(restarts)
        outputs = []
        with ExitStack() as unused:
            for local, prefix in enumerate(prefixes):
                own = None if folder is None else folder / str(local)
                if own is not None:
                    own.mkdir(parents=True, exist_ok=True)
                outputs.append(self._worker(unused, local, own, folder, prefix))
            unused.pop_all()  # the workers' now
        return outputs

    def close(self, limit_s: float | None = None) -> None:
        """Copy what is left to the console; with a limit, for all together, what a console that takes nothing leaves is copied later, and
        waited for by the last close, which has none."""
        ending = [*self._late, *self._followers] if limit_s is None else self._followers
        for each in ending:
            each.finish(0.0)  # all are told before one is waited for
        until = time.monotonic() + (_DRAIN_S if limit_s is None else limit_s)
        for each in ending:
            limited = limit_s is not None or each.may_never_end
            each.finish(max(0.0, until - time.monotonic()) if limited else None)
        self._late = [each for each in (*self._late, *self._followers) if each.copies]
        self._followers = []

    def _folder(self, restarts: int) -> Path | None:
        if self.wanted.log_dir == os.devnull:
            return None
        if not self._keeps:
            return self.scratch / f"{self.node}.{self._groups}"
        if self._run is None:
            base = self.wanted.log_dir or tempfile.mkdtemp(prefix="torchelastic_")
            Path(base).mkdir(parents=True, exist_ok=True)
            self._run = Path(tempfile.mkdtemp(prefix=f"{name_of(self.job)[:MAX_NAME]}_{self.node}_", dir=base))
            self.tell(f"{self.node}: logs in {self._run}")
        attempt = self._run / f"attempt_{restarts}"
        self.moved(str(attempt))
        return attempt

    @property
    def _keeps(self) -> bool:
        return bool(self.wanted.log_dir) or self.wanted.redirects.any or self.wanted.tee.any

    def _worker(self, unused: ExitStack, local: int, own: Path | None, group: Path | None, prefix: str) -> WorkerOutput:
        kept = str(own) if own is not None and self._keeps else ""
        error_file = "" if own is None else _unused(own / "error.json")
        output = WorkerOutput(error_file, kept)
        output.stdout, _ = self._stream(unused, OUT, local, own, group, prefix)
        output.stderr, tail = self._stream(unused, ERR, local, own, group, prefix)
        output._tail = tail
        return output

    def _stream(
        self, unused: ExitStack, stream: int, local: int, own: Path | None, group: Path | None, prefix: str
    ) -> tuple[int | None, Callable[[], tuple[str, ...]]]:
        """(descriptor for the worker, how to read its last lines). ``unused``: closes the former, if nobody takes it."""
        wanted = self.wanted
        teed = wanted.tee.has(local, stream)
        if own is not None and group is not None and (teed or wanted.redirects.has(local, stream)):
            path = own / f"{_NAMES[stream]}.log"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            unused.callback(os.close, descriptor)
            if teed:
                needles = wanted.copies_out if stream == OUT else wanted.copies_err
                copy = (group / f"filtered_{_NAMES[stream]}.log", needles) if needles else None
                self._followers.append(Follower(path, stream if wanted.shows(local) else None, prefix, copy))
            return descriptor, lambda: _last_lines(path)
        if wanted.shows(local) and (stream == OUT or os.isatty(ERR)):
            return None, tuple
        if stream == OUT:
            descriptor = os.open(os.devnull, os.O_WRONLY)
            unused.callback(os.close, descriptor)
            return descriptor, tuple
        pump = Pump(ERR if wanted.shows(local) else None)
        unused.callback(os.close, pump.write_end)  # else it would never end
        self._followers.append(pump)
        return pump.write_end, pump.tail


class Pump:
    """A pipe whose bytes go on to a descriptor of ours, if any, and whose end is remembered."""

    may_never_end = True
    """Somebody else may hold the pipe."""

    def __init__(self, sink: int | None) -> None:
        self._read_end, self.write_end = os.pipe()
        try:
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # the user's limit for pipes is reached; the ordinary size does
        self._sink = sink
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._read_end)
            os.close(self.write_end)
            raise

    def tail(self) -> tuple[str, ...]:
        """What came last; waits a moment for what is still in the pipe."""
        end = time.monotonic() + 1
        while time.monotonic() < end and (self._waiting() or not self._idle.is_set()):
            time.sleep(0.001)
        return _lines(b"".join(list(self._kept)))

    def finish(self, limit_s: float | None = None) -> None:
        """The writer has ended: copy the rest."""
        self._thread.join(_DRAIN_S if limit_s is None else limit_s)

    @property
    def copies(self) -> bool:
        """It is not done yet."""
        return self._thread.is_alive()

    def _waiting(self) -> bool:
        """Whether bytes are in the pipe; it is closed once there never will be."""
        count = array("i", [0])
        try:
            fcntl.ioctl(self._read_end, termios.FIONREAD, count)
        except OSError:
            return False
        return count[0] > 0

    def _run(self) -> None:
        with os.fdopen(self._read_end, "rb", buffering=0) as pipe:
            ready = select.poll()
            ready.register(pipe, select.POLLIN)
            while True:
                self._idle.set()
                ready.poll()
                self._idle.clear()  # before the bytes leave the pipe: whoever sees it empty must see that they are being kept
                chunk = pipe.read(1 << 16)
                if not chunk:
                    break
                self._keep(chunk)
                if self._sink is not None:
                    write_all(self._sink, chunk)
        self._idle.set()

    def _keep(self, chunk: bytes) -> None:
        self._kept.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._kept[0]) > _TAIL_BYTES:
            self._size -= len(self._kept.popleft())


class Follower:
    """Copies the lines that a file gains, with a prefix, to a descriptor of ours; those that hold a needle also to another file.

    A carriage return ends a line too (progress bars), and so does a while in which nothing comes (a prompt).
    """

    may_never_end = False

    def __init__(self, path: Path, sink: int | None, prefix: str, copy: tuple[Path, Sequence[str]] | None) -> None:
        self._sink, self._prefix = sink, prefix
        self._needles = copy[1] if copy else ()
        self._rest = b""
        self._grew = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tee", daemon=True)
        with ExitStack() as unused:
            self._copy = unused.enter_context(open(copy[0], "ab", buffering=0)) if copy else None
            self._file: BinaryIO = unused.enter_context(open(path, "rb"))
            self._file.seek(0, os.SEEK_END)
            self._thread.start()
            unused.pop_all()  # the thread's now

    def finish(self, limit_s: float | None = None) -> None:
        """The writer has ended: copy the rest."""
        self._over.set()
        self._thread.join(limit_s)

    @property
    def copies(self) -> bool:
        """It is not done yet."""
        return self._thread.is_alive()

    def _run(self) -> None:
        with self._file:
            while not self._over.wait(_POLL_S):
                self._drain()
            self._drain()
            self._flush()
        if self._copy is not None:
            self._copy.close()

    def _drain(self) -> None:
        while chunk := self._file.read(1 << 16):
            lines, self._rest = split(self._rest + chunk)
            for line in lines:
                self._line(line + b"\n")
            self._grew = time.monotonic()
            if len(self._rest) > _LINE_BYTES:
                self._flush()
        if time.monotonic() - self._grew > _STILL_S:
            self._flush()

    def _flush(self) -> None:
        """What has no end yet is a line of its own."""
        line = self._rest.removesuffix(b"\r")
        if line:
            self._line(line + b"\n")
        self._rest = b""

    def _line(self, line: bytes) -> None:
        text = Template(self._prefix).safe_substitute(time=time.strftime("%H:%M:%S")).encode() + line
        if self._sink is not None:
            write_all(self._sink, text)
        if self._copy is not None and any(n.encode() in line for n in self._needles):
            write_all(self._copy.fileno(), text)


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """Lines without their ends (LF, CR LF, CR), and the rest, which has none yet; what is empty before a lone CR is no line.

    A CR at the very end may be half of a CR LF: it stays with the rest.
    """
    lines, begin = [], 0
    for end in _ENDS.finditer(data):
        line = data[begin : end.start()]
        if line or end[0] != b"\r":
            lines.append(line)
        begin = end.end()
    return lines, data[begin:]


def write_all(descriptor: int, data: bytes) -> None:
    """Write; a reader that is gone, or a disk that is full, is no reason to stop."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        pass


def _unused(path: Path) -> str:
    """A name that no earlier worker of this attempt has used."""
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"error.{number}.json")
    return str(path)


def _last_lines(path: Path) -> tuple[str, ...]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return _lines(file.read())
    except OSError:
        return ()


def _lines(data: bytes) -> tuple[str, ...]:
    text = data.decode(errors="replace")
    return tuple(line.rpartition("\r")[2] if line.rstrip("\r") else line for line in text.splitlines()[-TAIL_LINES:])
