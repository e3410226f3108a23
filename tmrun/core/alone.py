"""What an agent does whatever the store says, and whether it answers or not. May not know: how long anything took, who asks."""

from __future__ import annotations

from enum import Enum

from tmrun.core.model import FENCE_SHARE
from tmrun.core.preemption import HANDOVER_S

MARGIN_S = 5.0
"""What it takes to say that workers have ended."""


class Alone(Enum):
    """One step at a time."""

    GO_ON = "go on"
    END_WORKERS = "end the workers gently"
    """The machine is shut down, and nobody takes the ranks over, or can be asked to."""
    LEAVE = "leave"
    """... and there is nothing more to wait for."""
    GIVE_UP = "give up"
    """Nothing is left to do here, and the store, which does not answer, has been silent for longer than the job would wait for a node."""


def judge(term_s: float | None, silent_s: float, *, runs: bool, ending: bool, ttl_s: float, patience_s: float, grace_s: float) -> Alone:
    """``term_s``: since SIGTERM, None: there was none. ``silent_s``: since the store answered. ``runs``: workers of a slot may live here;
    ``ending``: they were told to end. ``patience_s``: ``Spec.node_wait_s``. ``grace_s``: from SIGTERM to SIGKILL."""
    silent = silent_s > ttl_s * FENCE_SHARE  # others may soon take this agent for dead
    if term_s is not None:
        if runs and not ending and (silent or term_s > HANDOVER_S):
            return Alone.END_WORKERS
        if (silent and not runs) or term_s > HANDOVER_S + grace_s + MARGIN_S:
            return Alone.LEAVE
    return Alone.GIVE_UP if silent and silent_s > patience_s and not runs else Alone.GO_ON
