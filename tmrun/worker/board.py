"""What the agent asked for: the only state that the link thread and the main thread share.

Rules:
- A newer Prepare replaces every older one that is still undecided; its build is dropped.
- Abort drops a migration. A committed one stands until the main thread has carried it out (``done``), or a later one: a drain whose stop
  step was not reached any more is superseded by the failure migration that follows.
- So at most one undecided migration exists, after at most a few committed ones.
- Everyone who waits is woken by every change.
May not know: what a migration means, torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tmrun import wire
from tmrun.worker.build import Build, Status


@dataclass(eq=False)
class Pending:
    """One migration as this process knows it."""

    prepare: wire.Prepare
    noticed: float
    build: Build | None = None
    commit: wire.Commit | None = None
    committed: float = 0.0
    gone: bool = False
    reached: bool = False
    """Whether the main thread has noticed."""

    @property
    def id(self) -> int:
        """Its migration id."""
        return self.prepare.migration

    @property
    def failure(self) -> bool:
        """Whether ranks were lost (else: drained)."""
        return self.prepare.kind is wire.Kind.FAILURE

    @property
    def ready(self) -> bool:
        """Whether our side is built."""
        return self.build is not None and self.build.status is Status.READY


class Board:
    """Pending migrations, oldest first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[Pending] = []

    def post(self, pending: Pending) -> None:
        """A Prepare arrived."""
        with self._changed:
            for older in [p for p in self._pending if p.commit is None]:
                self._drop(older)
            self._pending.append(pending)
            self._changed.notify_all()

    def decide(self, message: wire.Commit | wire.Abort) -> None:
        """A Commit or an Abort arrived; of an unknown migration it means nothing."""
        with self._changed:
            for pending in [p for p in self._pending if p.id == message.migration]:
                if isinstance(message, wire.Commit):
                    pending.commit, pending.committed = message, time.monotonic()
                elif pending.commit is None:
                    self._drop(pending)
            self._changed.notify_all()

    def done(self, pending: Pending) -> None:
        """A committed migration was carried out; whatever is older has been superseded."""
        with self._changed:
            if pending in self._pending:
                self._pending.remove(pending)
            for older in [p for p in self._pending if p.id < pending.id]:
                self._drop(older)
            self._changed.notify_all()

    def poke(self) -> None:
        """Something else changed (a build)."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Block until the condition holds; False when the time is over."""
        with self._changed:
            return self._changed.wait_for(until, timeout_s)

    @property
    def drain(self) -> Pending | None:
        """The drain in preparation or committed, if any."""
        return next((p for p in list(self._pending) if not p.failure), None)

    @property
    def failure(self) -> Pending | None:
        """The oldest failure that awaits this process, if any."""
        return next((p for p in list(self._pending) if p.failure), None)

    @property
    def newest(self) -> Pending | None:
        """The latest Prepare, if it still stands."""
        return next(reversed(list(self._pending)), None)

    def _drop(self, pending: Pending) -> None:
        pending.gone = True
        self._pending.remove(pending)
        if pending.build is not None:
            pending.build.drop()
