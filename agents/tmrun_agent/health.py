"""Watches this node's workers from outside, on a thread of its own: their beacons, and what the kernel says of them.

When a worker makes no progress for longer than its history allows, the stacks of all threads of all workers here are written to the log,
and the loop is told how each of them looks (``Noticed``); when they move again, it is told that too. A frozen worker cannot write its
stacks; of it the kernel's word is kept. May not know: who is to blame, what is done about it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tmrun import procs
from tmrun.beacon import DUMP_SIGNAL, Beacon, dump_path
from tmrun.core import watchdog
from tmrun.core.model import Evidence, Sign
from tmrun.core.watchdog import Limits, Place, Watch

LOOK_S = 0.1
ENDED = ("X", "Z")
"""The letters of a process that is no more; whose end is somebody else's news."""
STOPPED = "T"
"""The kernel's letter for a process that a signal stopped; one that a debugger holds has another."""
TELL_AGAIN_S = 2.0
SAMPLE_EVERY_S = 5.0
SAMPLE_STEPS = 4
"""Fewer steps make no average."""
_DUMP_WAIT_S = 0.3
_MAX_STACK_LINES = 120
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<what>.+)')
_NOT_THE_SCRIPT = re.compile(r"/(torch|tmrun|site-packages|dist-packages)/|/lib/python3|^<")


@dataclass(frozen=True, slots=True)
class Noticed:
    """How the workers with these pids look now; ``rank`` of a sign is a local rank here. No signs: they move again."""

    pids: tuple[int, ...]
    signs: tuple[Sign, ...]


@dataclass
class _Worker:
    pid: int
    beacon: Beacon
    stacks: Path
    watch: Watch | None = None
    where: str = ""
    sampled: tuple[int, int] = (0, 0)
    """(steps, busy nanoseconds) when the last average was taken."""


@dataclass
class Health:
    """``limits`` None: nothing is ever noticed."""

    folder: Path
    host: str
    limits: Limits | None
    notice: Callable[[Noticed], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _workers: list[_Worker] = field(default_factory=list)
    _beacons: list[Beacon] = field(default_factory=list)
    _told: tuple[tuple[Evidence, object], ...] = ()
    _told_at: float = 0.0
    busy_s: float = 0.0
    """What the slowest worker here computes of a step, on average of the last seconds; 0 if unknown."""
    _sampled_at: float = 0.0

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="health", daemon=True).start()

    def prepare(self, local_rank: int) -> Path:
        """A new beacon for a worker that is about to start; those of one group in the order of their local ranks."""
        path = self.folder / f"{self.host}.{local_rank}.beacon"
        if local_rank == 0:
            self._beacons = []
        self._beacons.append(Beacon.create(path))
        return path

    def follow(self, pids: Sequence[int]) -> None:
        """These are the workers now, with the beacons that were prepared last."""
        paths = [dump_path(self.folder / f"{self.host}.{i}.beacon") for i in range(len(pids))]
        with self._lock:
            self._workers = [_Worker(*each) for each in zip(pids, self._beacons, paths, strict=True)]
            self._told = ()

    def proven_at(self) -> float:
        """The newest moment (boot clock, seconds) after which all ranks are known to have lived."""
        with self._lock:
            return max((w.beacon.get("proven_ns") / 1e9 for w in self._workers), default=0.0)

    def parked(self) -> bool:
        """Whether no worker can complete a step before a decision reaches it through its agent."""
        with self._lock:
            return bool(self._workers) and all(w.beacon.get("place") == Place.PARKED or w.beacon.get("cut") for w in self._workers)

    def waits(self, pid: int) -> bool:
        """Whether this worker waits for a decision."""
        with self._lock:
            return any(w.pid == pid and w.beacon.get("place") == Place.PARKED for w in self._workers)

    def step_of(self, pid: int) -> int:
        """The step that this worker began last, -1 if it never did."""
        with self._lock:
            worker = next((w for w in self._workers if w.pid == pid), None)
        return worker.beacon.get("step") if worker is not None and worker.beacon.get("place") else -1

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                workers = list(self._workers)
            if self.limits is not None and workers:
                self._look(workers, self.limits)
            if time.monotonic() - self._sampled_at > SAMPLE_EVERY_S:
                self._sample(workers)

    def _sample(self, workers: list[_Worker]) -> None:
        now = [(w.beacon.get("counted"), w.beacon.get("busy_ns")) for w in workers]
        if any(counted - w.sampled[0] < SAMPLE_STEPS for (counted, _), w in zip(now, workers, strict=True)):
            return
        averages = [(busy - w.sampled[1]) / (counted - w.sampled[0]) for (counted, busy), w in zip(now, workers, strict=True)]
        self.busy_s, self._sampled_at = max(averages, default=0.0) / 1e9, time.monotonic()
        for worker, sample in zip(workers, now, strict=True):
            worker.sampled = sample

    def _look(self, workers: list[_Worker], limits: Limits) -> None:
        now = time.monotonic()
        states = [process_state(w.pid) for w in workers]
        for worker, state in zip(workers, states, strict=True):
            worker.watch = watchdog.observe(worker.watch, worker.beacon.reading(stopped=state == STOPPED), now)
        found = [
            watchdog.evidence(w.watch, limits, now) if w.watch and state not in ENDED else None
            for w, state in zip(workers, states, strict=True)
        ]
        seen = tuple((f[0] if f else Evidence.NONE, w.watch and w.watch.last.position) for f, w in zip(found, workers, strict=True))
        if not any(found):
            seen = ()
        if seen == self._told and not (seen and now - self._told_at > TELL_AGAIN_S):
            return
        if any(map(_is_stuck, found)) and not any(map(_is_stuck, self._told)):
            self._dump(workers)
        with self._lock:
            if workers != self._workers:
                return  # others meanwhile
            self._told, self._told_at = seen, now
        signs = tuple(_sign(i, w, f) for i, (w, f) in enumerate(zip(workers, found, strict=True))) if seen else ()
        self.notice(Noticed(tuple(w.pid for w in workers), signs))

    def _dump(self, workers: list[_Worker]) -> None:
        """Ask all for their stacks, wait a moment, keep them in the log."""
        asked = {w.pid: _size(w.stacks) for w in workers if w.beacon.get("dumps") and process_state(w.pid) != STOPPED}
        for pid in asked:
            try:
                os.kill(pid, DUMP_SIGNAL)
            except OSError:
                continue
        time.sleep(_DUMP_WAIT_S)
        for local, worker in enumerate(workers):
            lines = _read_from(worker.stacks, asked[worker.pid]) if worker.pid in asked else []
            worker.where = innermost(lines)
            told = lines[:_MAX_STACK_LINES] or _kernels_word(worker.pid)
            text = "\n".join(f"tmrun: {self.host} worker {local} (pid {worker.pid}): {line}" for line in told)
            print(text, file=sys.stderr, flush=True)


def _is_stuck(found: tuple[Evidence, object] | None) -> bool:
    return found is not None and found[0].stuck


def _sign(local: int, worker: _Worker, found: tuple[Evidence, float] | None) -> Sign:
    assert worker.watch is not None
    last = worker.watch.last
    evidence, since_s = found or (Evidence.NONE, 0.0)
    return Sign(local, last.place.name, last.step, last.operations, evidence, round(since_s, 1), worker.where)


def process_state(pid: int) -> str:
    """The kernel's letter (``procs.Seen``); X unknown."""
    seen = procs.look(pid)
    return seen.state if seen is not None else "X"


def _kernels_word(pid: int) -> list[str]:
    """What is known of a process that writes no stacks itself."""
    found = [f"no stacks of its own; the kernel says: state {process_state(pid)}"]
    for name in ("wchan", "stack"):
        try:
            found += [f"{name}: {line}" for line in Path(f"/proc/{pid}/{name}").read_text().splitlines() if line not in ("0", "")]
        except OSError:
            continue  # only root may look
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> list[str]:
    try:
        with open(path, errors="replace") as file:
            file.seek(offset)
            return [line for line in file.read().splitlines() if line]
    except OSError:
        return []


def innermost(stacks: Sequence[str]) -> str:
    """Where the main thread is, as ``file:line in function``: the innermost frame of the script, else of anything. faulthandler calls the
    thread that took the signal the current one, and the kernel gives a process's signals to its main thread."""
    frames: list[tuple[str, str]] = []
    current = False
    for line in stacks:
        match = _FRAME.match(line)
        if match is None:
            current = line.startswith("Current thread") or (current and "most recent call first" not in line)
        elif current:
            frames.append((match["file"], f"{Path(match['file']).name}:{match['line']} in {match['what']}"))
    return next((text for file, text in frames if not _NOT_THE_SCRIPT.search(file)), frames[0][1] if frames else "")
