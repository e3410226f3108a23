"""Deaths on purpose, for tests: ``TMRUN_TEST_KILL=rank:step:point``.

Points inside the runtime: before_vote, after_vote, in_optimizer (the process kills itself), lose_vote (the rank acts as if the vote's
result had not reached it). Other points are for test scripts. Nothing of this exists in a process without the variable.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

ENV = "TMRUN_TEST_KILL"
Fault = Callable[[int, str], bool]


def from_environment(rank: int) -> Fault | None:
    """``fault(step, point)``: kills the process, or says that a vote is to be lost. None when nothing is planned for this rank."""
    plans = [entry.split(":") for entry in os.environ.get(ENV, "").split(",") if entry]
    mine = {(int(step), point) for who, step, point in plans if int(who) == rank}
    if not mine:
        return None

    def fault(step: int, point: str) -> bool:
        if (step, point) not in mine:
            return False
        if point != "lose_vote":
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    return fault
