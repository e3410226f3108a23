"""Writes what is only for people (events, progress, timings) to the store, on a thread of its own: never blocks, never decides.

When the store is away, progress is dropped and the rest waits in a bounded queue. May not know: what is being told.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace

from tmrun.core import conditions
from tmrun.core.codec import encode
from tmrun.core.errors import OutcomeUnknown, StoreError, StoreUnavailable
from tmrun.core.keys import Keys
from tmrun.core.model import Event, Failure, Host, Incarnation, Lag, Progress, Receiving, Timing
from tmrun.core.story import EventKind
from tmrun.store.api import Store

PROGRESS_EVERY_S = 0.5
_QUEUE = 1000


class Publisher:
    """Thread-safe; ``close`` writes what is left, for at most ``CLOSE_S``."""

    CLOSE_S = 2.0

    def __init__(self, store: Store, keys: Keys, host: Host, life: str) -> None:
        self._store, self._keys, self._host, self._life = store, keys, host, life
        self._queue: queue.Queue[tuple[str, str] | None] = queue.Queue(_QUEUE)
        self._events = 0
        self._reason = ""
        self._overdue = 0
        self._lag = Lag(host, Incarnation(life), 0.0)
        self._progress: Progress | None = None
        self._receiving = Receiving(host, {})
        self._written: dict[str, Progress | Receiving] = {}
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def event(self, text: str, kind: EventKind = EventKind.NOTE) -> None:
        """Tell one line of the story."""
        self._events += 1
        self._put(self._keys.event(f"{self._host}.{self._life}", self._events), encode(Event(time.time(), self._host, text, kind.value)))

    def timing(self, epoch: int, timing: Timing) -> None:
        """Tell (again, in full) how a worker fared in a switch."""
        self._put(self._keys.timing(epoch, timing.rank), encode(timing))

    def failure(self, failure: Failure) -> None:
        """Tell all that is known of a worker's end."""
        self._put(self._keys.failure(failure.epoch, failure.rank), encode(failure))

    def logs(self, folder: str) -> None:
        """Tell where this node's workers write, one folder a local rank."""
        self._put(self._keys.logs(self._host), folder)

    def reason(self, text: str) -> None:
        """Tell what the coordinator waits for, or does; only changes are written."""
        if text != self._reason:
            self._reason = text
            self._put(self._keys.reason, text)

    def overdue(self, migration: int) -> None:
        """Tell which migration takes too long; only changes are written."""
        if migration != self._overdue:
            self._overdue = migration
            self._put(self._keys.overdue, str(migration))

    def lag(self, answer_s: float) -> None:
        """Tell that the store's answers take so long, if that is long; only changes are written."""
        known = self._lag.seconds
        if conditions.lag(known, answer_s) != known:
            self._lag = replace(self._lag, seconds=conditions.lag(known, answer_s))
            self._put(self._keys.lag(self._host), encode(self._lag))

    def progress(self, epoch: int, step: int, step_s: float, busy_s: float) -> None:
        """Tell how far the workers are; only the newest counts."""
        newest = self._progress
        if newest is None or (newest.epoch, newest.step, newest.step_s) != (epoch, step, step_s):
            self._progress = Progress(self._host, step, step_s, time.time(), round(busy_s, 6), epoch)

    def receiving(self, rank: int, done: int, total: int) -> None:
        """Tell how much of its state a joiner has; only the newest counts."""
        self._receiving = Receiving(self._host, {**self._receiving.ranks, rank: (done, total)})

    def close(self) -> None:
        """Write what is left and end the thread."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass
        self._thread.join(self.CLOSE_S)

    def _put(self, key: str, value: str) -> None:
        try:
            self._queue.put_nowait((key, value))
        except queue.Full:
            pass  # the store has been away for long; the protocol state is elsewhere

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                if item is None:
                    self._write_progress()
                    return
                self._write(*item)
            except queue.Empty:
                pass
            if time.monotonic() >= due:  # also while there is much else to tell, as after a migration
                self._write_progress()
                due = time.monotonic() + PROGRESS_EVERY_S

    def _write_progress(self) -> None:
        self._write_newest(self._keys.progress(self._host), self._progress)
        self._write_newest(self._keys.receiving(self._host), self._receiving if self._receiving.ranks else None)

    def _write_newest(self, key: str, newest: Progress | Receiving | None) -> None:
        if newest is not None and newest != self._written.get(key) and self._try(key, encode(newest)):
            self._written[key] = newest

    def _write(self, key: str, value: str) -> None:
        while not self._try(key, value):
            time.sleep(1)

    def _try(self, key: str, value: str) -> bool:
        """False: try again later. What the store refuses is dropped; it is only for people."""
        try:
            self._store.put(key, value)
        except (StoreUnavailable, OutcomeUnknown):
            return False
        except StoreError:
            pass
        return True
