"""How far the job's training is, and what it does at the moment: it trains, or it is stopped and there is a term for that.

Time passes in closed form between two events. May not know: why it is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tmrun.sim.costs import Costs
from tmrun.sim.ledger import Ledger, Term


@dataclass
class Progress:
    """``every_s``: training time between two checkpoints; ``snapshots``: copies to partners' memory are kept."""

    costs: Costs
    every_s: float
    snapshots: bool
    ledger: Ledger = field(default_factory=Ledger)
    done_s: float = 0.0
    """Useful work so far, in seconds of undisturbed training."""
    stopped: Term | None = None
    """What the time is booked as; None: training."""
    alarm: bool = False
    """It is stopped for the sake of a healthy host."""
    slow: set[int] = field(default_factory=set)
    """Stragglers that hold ranks."""
    _since: float = 0.0

    def pass_to(self, when: float) -> None:
        """Book the time since the last call."""
        start, self._since = self._since, when
        seconds = when - start
        if seconds <= 0:
            return
        if self.stopped is not None:
            self.ledger.book(Term.ALARM if self.alarm else self.stopped, start, when)
            return
        snapshot = self.costs.snapshot
        checkpoint = self.costs.checkpoint.write_s / self.every_s
        per_step = snapshot.write_s / (snapshot.every_steps * self.costs.step_s) if self.snapshots else 0.0
        slow = self.costs.slowdown if self.slow else 0.0
        useful = seconds / (1 + checkpoint + per_step + slow)
        self.ledger.work(useful, checkpoint=useful * checkpoint, snapshot=useful * per_step, degraded=useful * slow)
        self.done_s += useful

    @property
    def step(self) -> int:
        """The step that runs now."""
        return int(self.done_s / self.costs.step_s + 1e-9)

    @property
    def snapshot_step(self) -> int | None:
        """Of the newest copies in partners' memory."""
        return self.step - self.step % self.costs.snapshot.every_steps if self.snapshots else None

    def back_to_step(self, step: int) -> None:
        """Go on from this step, if it is an earlier one."""
        self._back_to(min(self.done_s, step * self.costs.step_s))

    def back_to_checkpoint(self) -> None:
        """Go on from the last one."""
        self._back_to(int(self.done_s / self.every_s + 1e-9) * self.every_s)

    def _back_to(self, seconds: float) -> None:
        self.ledger.lose(self.done_s - seconds)
        self.done_s = seconds
