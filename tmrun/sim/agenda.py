"""What is going to happen, in the order of its times: a virtual clock and the actions that wait for it. May not know: what they do."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

_NEVER = float("inf")


@dataclass
class Agenda:
    """``launch`` numbers the launches of the job: what was planned in an earlier one and is ``tied`` to it does not happen any more."""

    now: float = 0.0
    launch: int = 0
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _pushed: int = 0

    def after(self, delay_s: float, action: Callable[[], None], *, tied: bool = True) -> None:
        """Do it so much later; of equal times in the order in which they were planned."""
        launch = self.launch

        def run() -> None:
            if not tied or launch == self.launch:
                action()

        self._pushed += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._pushed, run))

    @property
    def due(self) -> float:
        """When the next action is due."""
        return self._queue[0][0] if self._queue else _NEVER

    def next(self) -> Callable[[], None]:
        """The next action, which is forgotten here."""
        return heapq.heappop(self._queue)[2]
