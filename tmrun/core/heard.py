"""What readers know of a job besides its protocol state: what agents tell for people, and what the reader finds itself.

May not know: who is shown it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tmrun.core.model import Lag, Progress, Receiving, Timing


@dataclass(frozen=True, slots=True)
class Heard:
    """Everything may be missing."""

    progress: Sequence[Progress] = ()
    """Of all nodes."""
    reason: str = ""
    """The coordinator's last words on what it does, or waits for."""
    overdue: int = 0
    """The migration that it says takes too long."""
    timings: Sequence[Timing] = ()
    """The workers' accounts of the newest epoch."""
    receiving: Sequence[Receiving] = ()
    """State on its way."""
    lags: Sequence[Lag] = ()
    """Who waits for the store."""
    answer_s: float = 0.0
    """The store's quickest answer to the reader."""
    now: float = 0.0
    """The reader's wall clock, for ages."""
