"""Before an agent is there: a store that does not answer is asked again, for a while, and a name that is taken is waited for, unless a
signal asks for the agent's end.

Later the loop itself lives with that. May not know: what is asked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import Signals
from typing import TypeVar

from tmrun.core import errors
from tmrun_agent.feeders import Interrupted
from tmrun_agent.loop import Inbox

AGAIN_S = 0.5
T = TypeVar("T")


@dataclass
class Patience:
    """``seconds`` for all that is asked."""

    host: str
    inbox: Inbox
    seconds: float

    def __post_init__(self) -> None:
        self._until, self._told = time.monotonic() + self.seconds, False

    def ask(self, what: Callable[[], T]) -> T:
        """The answer. Raises StoreError: there was none in time, or it was no; Interrupted."""
        while True:
            self._heed()
            try:
                return what()
            except (errors.StoreUnavailable, errors.OutcomeUnknown, errors.LeaseGone) as error:
                if time.monotonic() >= self._until:
                    raise
                if not self._told:
                    print(f"tmrun: {self.host}: {error.brief}; it is asked again, {self.seconds:g} s at most", file=sys.stderr, flush=True)
                self._told = True
            time.sleep(AGAIN_S)

    def pause(self, seconds: float) -> None:
        """For what is asked and has to wait for something itself, little by little. Raises Interrupted."""
        time.sleep(seconds)
        self._heed()

    def _heed(self) -> None:
        """Whatever else came meanwhile is the loop's."""
        for _ in range(self.inbox.qsize()):
            item = self.inbox.get()
            if isinstance(item, Interrupted):
                raise errors.Interrupted(item.number, Signals(item.number).name)
            self.inbox.put(item)
