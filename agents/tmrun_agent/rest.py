"""A node whose rehearsals failed tries again after a while: a file system may be back, or a limit raised. May not know: why they failed."""

from __future__ import annotations

from dataclasses import dataclass

from tmrun.core import idle, node

AFTER_S = 300.0
"""A script that cannot be rehearsed costs its machine three tries in this time."""


@dataclass
class Rest:
    """``tend`` is called all the time."""

    _since: float = -1.0

    def tend(self, mine: node.Node, now: float) -> node.Rested | None:
        """``now``: monotonic seconds. A fact, once it is over."""
        if not idle.gave_up(mine):
            self._since = -1.0
            return None
        self._since = now if self._since < 0 else self._since
        if now - self._since < AFTER_S:
            return None
        self._since = -1.0
        return node.Rested()
