"""Kinds of events: what hooks and filters go by, so that nobody has to match the text. May not know: who listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tmrun.core.txn import Txn


class EventKind(str, Enum):
    """The names are stable."""

    NOTE = "note"
    JOB_STARTED = "job_started"
    JOB_RESTARTED = "job_restarted"
    JOB_ENDED = "job_ended"
    MIGRATION_PROPOSED = "migration_proposed"
    MIGRATION_COMMITTED = "migration_committed"
    MIGRATION_ABORTED = "migration_aborted"
    REQUEST_FINISHED = "request_finished"
    DRAIN_FORCED = "drain_forced"
    STANDBY_CHANGED = "standby_changed"
    """A standby is warm, or cannot be one."""
    WORKERS_FAILED = "workers_failed"
    WORKERS_STUCK = "workers_stuck"
    """A rank keeps the others waiting."""
    NODE_SLOW = "node_slow"
    """... computes slower than the others, or no longer."""
    NODE_LEAVES = "node_leaves"
    """The machine is about to be taken away, or stays after all."""
    NODE_FENCED = "node_fenced"
    STORE = "store"
    """The store does not answer a node."""
    STORE_BACK = "store_back"
    """... answers it again."""
    CHAOS = "chaos"
    """An operator injects a fault, to see what happens."""


_OF_TXN = {
    "initial": EventKind.JOB_STARTED,
    "restart": EventKind.JOB_RESTARTED,
    "end": EventKind.JOB_ENDED,
    "propose": EventKind.MIGRATION_PROPOSED,
    "commit": EventKind.MIGRATION_COMMITTED,
    "abort": EventKind.MIGRATION_ABORTED,
    "finish": EventKind.REQUEST_FINISHED,
    "force": EventKind.DRAIN_FORCED,
    "evict": EventKind.WORKERS_STUCK,
    "blame": EventKind.WORKERS_STUCK,
    "update": EventKind.STANDBY_CHANGED,
    "release": EventKind.WORKERS_FAILED,
}


_SAME_S = 5.0
"""What began so soon after an outage is that outage: writers' clocks differ, and not everybody gets through at the same moment."""


@dataclass
class Outages:
    """One outage of the store is worth two lines, however many tell of it; most of them can only do so when it is over."""

    _out: set[str] = field(default_factory=set)
    _until: float = float("-inf")

    def began(self, who: str, time: float) -> bool:
        """Whether this is news. ``time``: wall clock of ``who``."""
        if time <= self._until + _SAME_S:
            return False
        news = not self._out
        self._out.add(who)
        return news

    def ended(self, who: str, time: float) -> bool:
        """... once it is over for all who told of it."""
        if who not in self._out:
            return False
        self._out.remove(who)
        self._until = max(self._until, time)
        return not self._out


def kind_of(txn: Txn) -> EventKind:
    """What the success of a transaction that is worth a line means; by the first word of its name."""
    return _OF_TXN.get(txn.name.split()[0], EventKind.NOTE)
