"""A decision of the coordinator, and the clock readings it may rest on. May not know: any rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tmrun.core import transactions
from tmrun.core.membership import Job
from tmrun.core.model import End, JobState
from tmrun.core.txn import Txn


@dataclass(frozen=True, slots=True)
class Timers:
    """When this coordinator first saw something, by its own monotonic clock."""

    seen: Mapping[str, float] = field(default_factory=dict)

    def since(self, what: str, now: float) -> float:
        """Seconds since ``what`` began, 0 if it has not."""
        return now - self.seen.get(what, now)


@dataclass(frozen=True, slots=True)
class Decision:
    """``say`` is the line for the operator once the transaction has succeeded (empty: not worth one). ``lacking``: all workers are to
    start anew, and nodes are missing for that."""

    txn: Txn | None
    reason: str
    say: str = ""
    lacking: bool = False


def ending(job: Job, state: JobState, code: int, reason: str) -> Decision:
    """The job is over."""
    return Decision(transactions.end_job(job, End(state, code, reason), as_leader=True), reason, f"job {state.value}: {reason}")


DOUBT_SHARE = 1.5
"""A lost connection that no death has explained for so many lease times is a broken link."""
