"""A process's own clock: median step time, which progress to report, and how long a switch interrupted training."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

_REPORT_EVERY_S = 0.2
_WINDOW = 32


@dataclass
class _Interruption:
    epoch: int
    resumed: float
    redo: bool


class Pace:
    """Fed with every step's begin and end."""

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=_WINDOW)
        self._median = 0.0
        self._begun = 0.0
        self._ended: float | None = None
        self._reported = 0.0
        self._interruption: _Interruption | None = None

    @property
    def step_s(self) -> float:
        """Median duration of the last steps, 0 if unknown."""
        return self._median

    @property
    def overdue_at(self) -> float:
        """When the step that began last should have been done (monotonic seconds): from then on something is wrong."""
        return self._begun + self.step_s

    def due(self) -> bool:
        """Whether progress should be reported now."""
        now = time.monotonic()
        if now - self._reported < _REPORT_EVERY_S:
            return False
        self._reported = now
        return True

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.monotonic()

    def switched(self, epoch: int, *, redo: bool) -> None:
        """Training goes on in a new epoch."""
        self._interruption = _Interruption(epoch, time.monotonic(), redo)

    def end(self) -> tuple[int, float, float] | None:
        """A step happened. After a switch: (epoch, redo_s, pause_s)."""
        now = time.monotonic()
        interruption, self._interruption = self._interruption, None
        before, self._ended = self._ended, now
        if interruption is None:
            self._durations.append(now - self._begun)
            self._median = statistics.median(self._durations)
            return None
        pause = max(0.0, now - before - self.step_s) if before is not None else 0.0
        return interruption.epoch, now - interruption.resumed if interruption.redo else 0.0, pause
