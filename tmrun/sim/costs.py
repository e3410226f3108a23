"""What each phase of a recovery costs, in seconds; from a file, or as jobs of ours measured them (rows of ``tmrun history``).

May not know: files, when a phase happens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from tmrun.core.errors import UsageError
from tmrun.sim.formulas import daly_interval


@dataclass(frozen=True, slots=True)
class Detect:
    """From the fault to somebody knowing it, seconds. A vanished host is known when its lease has run out: that is simulated."""

    exit_s: float = 1.0
    hang_s: float = 30.0
    slow_s: float = 60.0
    lease_ttl_s: int = 6
    watchdog_s: float = 600.0
    """What the peers need for a hang: NCCL's watchdog."""
    peer_vanish_s: float = 30.0
    """What the peers need for a host that vanishes: keep-alives and broken connections."""


@dataclass(frozen=True, slots=True)
class Move:
    """A migration. Before the votes: ``prepare_s`` (stayers) and ``bind_s`` (joiner), behind training's back in a drain.

    After the commit everybody waits for the longer of ``comm_s`` and ``state_s``.
    """

    prepare_s: float = 0.0
    bind_s: float = 4.5
    comm_s: float = 7.0
    state_s: float = 16.6


@dataclass(frozen=True, slots=True)
class Standby:
    """``warm_s``: from a machine's arrival until it is a warm standby."""

    warm_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A duration at a size."""

    gpus: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Restart:
    """All workers start anew. ``framework`` by job size, log-linear between the points, constant outside."""

    cleanup_s: float = 31.2
    reschedule_s: float = 90.0
    framework: tuple[Measured, ...] = (Measured(8192, 267.0),)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``write_s``: how long a checkpoint to storage blocks training. ``every_s`` 0: Young/Daly."""

    write_s: float = 10.0
    every_s: float = 0.0
    longest_s: float = 3600.0

    def interval_s(self, restarts: int, horizon_s: float) -> float:
        """Training time between two checkpoints where so many restarts are to be expected in ``horizon_s``."""
        return self.every_s or min(self.longest_s, daly_interval(self.write_s, horizon_s / (restarts + 1)))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies in a partner's memory, for shards without a replica: every so many steps, training blocked for ``write_s``."""

    every_steps: int = 10
    write_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Costs:
    """One cost model. ``slowdown``: a straggler makes every step longer by this share."""

    name: str
    source: str
    step_s: float = 10.0
    slowdown: float = 0.2
    detect: Detect = Detect()
    move: Move = Move()
    standby: Standby = Standby()
    restart: Restart = Restart()
    checkpoint: Checkpoint = Checkpoint()
    snapshot: Snapshot = Snapshot()

    def check(self, where: str) -> Costs:
        """Relations between the values. Raises UsageError."""
        for wrong, what in (
            (self.step_s <= 0, "step_s must be above 0"),
            (self.detect.lease_ttl_s < 1, "detect.lease_ttl_s must be at least 1"),
            (
                not self.restart.framework or any(p.gpus < 1 for p in self.restart.framework),
                "restart.framework needs points with gpus >= 1",
            ),
            (self.snapshot.every_steps < 1, "snapshot.every_steps must be at least 1"),
        ):
            if wrong:
                raise UsageError(f"{where}: {what}")
        return self

    def framework_s(self, gpus: int) -> float:
        """Start of all workers of a job of so many GPUs, in seconds."""
        points = sorted((p.gpus, p.seconds) for p in self.restart.framework)
        if gpus <= points[0][0]:
            return points[0][1]
        for (g0, s0), (g1, s1) in pairwise(points):
            if gpus <= g1:
                return s0 + (s1 - s0) * math.log(gpus / g0) / math.log(g1 / g0)
        return points[-1][1]

    @property
    def expected_s(self) -> float:
        """The pause of a planned move."""
        return max(self.move.comm_s, self.move.state_s)

    @property
    def unexpected_s(self) -> float:
        """The pause of a failure with a warm standby, without detection, decision and redo."""
        return max(self.move.prepare_s, self.move.bind_s) + self.expected_s


def from_history(base: Costs, rows: Sequence[Any], name: str) -> Costs:
    """``base`` with detection and moves as jobs of ours measured them: medians over rows of ``tmrun history``. Raises UsageError."""
    moves = [r for r in rows if isinstance(r, dict) and r.get("cause") in ("failure", "drain") and r.get("pause_s") is not None]
    if not moves:
        raise UsageError(f"{name}: no finished migration in it; drain a node or kill a worker of that job first")
    failures = [r for r in moves if r["cause"] == "failure"]
    measured = Move(
        prepare_s=_median(failures, "comm_s", base.move.prepare_s, name),
        bind_s=_median(failures, "bind_s", base.move.bind_s, name),
        comm_s=_median([r for r in moves if r["cause"] == "drain"], "comm_s", 0.0, name),
        state_s=_median(moves, "state_s", base.move.state_s, name),
    )
    detect = replace(base.detect, exit_s=_median(failures, "detect_s", base.detect.exit_s, name))
    source = f"{len(moves)} migrations measured in {name}; the rest from {base.name}"
    return replace(base, name=name, source=source, detect=detect, move=measured)


def _median(rows: Sequence[Mapping[str, Any]], phase: str, otherwise: float, name: str) -> float:
    values = [r[phase] for r in rows if r.get(phase) is not None]
    wrong = next((v for v in values if isinstance(v, bool) or not isinstance(v, (int, float)) or not 0 <= v < math.inf), None)
    if wrong is not None:
        raise UsageError(f"{name}: {phase} {wrong!r}: expected seconds, a number >= 0")
    return float(median(values)) if values else otherwise
