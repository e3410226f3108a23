"""A launcher none of whose agents is left and that runs the job's store: it stays as long as others need that.

May not know: agents, how a store is run, what ends a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tmrun.core import storehosts
from tmrun.core.membership import Job
from tmrun.core.model import Host
from tmrun.core.plural import some

LOOK_S = 10.0
"""Each look reads the whole job."""


@dataclass
class Keep:
    """``own``: the names of this launcher's nodes; ``patience_s``: for so long whoever holds ranks keeps them without a store. ``read``
    raises StoreError when the store does not answer."""

    own: tuple[Host, ...]
    patience_s: float
    read: Callable[[], Job]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _stays: bool = False
    """Others needed the store when it was last looked."""
    _look_at: float = -1.0
    _seen: float = float("-inf")
    """When another node was last registered."""

    def needed(self) -> bool:
        """Whether somebody else needs the store; looks now and then, and says so once. Raises StoreError."""
        now = self.clock()
        if self._stays and now < self._look_at:
            return True
        job = self.read()
        if storehosts.others(job, self.own) or self._look_at < 0:
            self._seen = now  # at the first look it is not known
        users = storehosts.users(job, self.own, waits=self._waits)
        if users and not self._stays:
            what = f"this host runs the job's store, which {some(users)} still {'needs' if len(users) == 1 else 'need'}"
            self.say(f"{what}: it stays until the job ends (Ctrl-C stops the job)")
        self._stays, self._look_at = bool(users), now + LOOK_S
        return self._stays

    @property
    def outlasts(self) -> bool:
        """They needed it, and it is not silent for so long that they have given it up."""
        return self._stays and self._waits

    @property
    def _waits(self) -> bool:
        return self.clock() - self._seen < self.patience_s
