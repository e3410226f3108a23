"""Closed forms: Young/Daly, Meta's ETTR, the paper's projection rebuilt, and how often a pool of standbys is empty.

Units are in the names. May not know: simulations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WEEK_H = 168.0


# -- checkpoints: Young (1974), Daly (2006) -----------------------------------------------------------------------------------------
def daly_interval(write_s: float, mttf_s: float) -> float:
    """Training time between two checkpoints that wastes least: sqrt(2 C M) - C, at least C."""
    return max(write_s, math.sqrt(2 * write_s * mttf_s) - write_s) or 1.0


def daly_waste(write_s: float, mttf_s: float, restart_s: float) -> float:
    """First-order floor of the wasted share: sqrt(2 C / M) + R / M. Valid for C and R much shorter than M."""
    return math.sqrt(2 * write_s / mttf_s) + restart_s / mttf_s


# -- Meta, "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (2024) ----------------------------------------
def meta_ettr(nodes: int, per_node_day: float, restart_s: float, interval_s: float, write_s: float = 0.0) -> float:
    """ETTR ~ (1 - N r (u0 + interval / 2)) / (1 + w / interval)."""
    per_s = nodes * per_node_day / 86_400
    return (1 - per_s * (restart_s + interval_s / 2)) / (1 + write_s / interval_s)


# -- the paper (TrainMover, OSDI 2026) ----------------------------------------------------------------------------------------------
def throughput_lost(restart_min: float, mttf_h: float) -> float:
    """Share of the throughput that restarts cost: their duration over the mean time between them."""
    return restart_min / 60 / mttf_h


@dataclass(frozen=True, slots=True)
class Projection:
    """The paper's projection of wasted GPU-hours a week, rebuilt from its printed percentages: downtimes and the idle standby, no more.

    Left out, as in the paper: detection, lost work, checkpoints, the time until a standby is replaced, false alarms.
    """

    mttf_h_at_8192: float = 3.0
    unplanned_for_each_planned: float = 8.9
    unexpected_s: float = 21.1
    expected_s: float = 16.6
    cold_s: float = 50.4
    parcae_s: float = 174.9
    standby_gpus: int = 8

    def _events(self, gpus: int) -> tuple[float, float]:
        unplanned = WEEK_H / (self.mttf_h_at_8192 * 8192 / gpus)
        return unplanned, unplanned / self.unplanned_for_each_planned

    def with_standby(self, gpus: int) -> float:
        """GPU-hours a week with one standby machine."""
        u, e = self._events(gpus)
        return gpus * (u * self.unexpected_s + e * self.expected_s) / 3600 + WEEK_H * self.standby_gpus

    def without_standby(self, gpus: int) -> float:
        """GPU-hours a week when the joiner starts at the failure."""
        u, e = self._events(gpus)
        return gpus * (u * self.cold_s + e * self.expected_s) / 3600

    def parcae(self, gpus: int) -> float:
        """GPU-hours a week with Parcae's reconfigurations."""
        u, e = self._events(gpus)
        return gpus * (u + e) * self.parcae_s / 3600


# -- the pool -----------------------------------------------------------------------------------------------------------------------
def empty_at_next(refill_h: float, mttf_h: float) -> float:
    """Chance that the next failure comes before the one standby is replaced: 1 - exp(-F / MTTF)."""
    return 1 - math.exp(-refill_h / mttf_h)


def in_refill(rates_h: dict[int, float], refill_h: float, upto: int) -> list[float]:
    """P(n machines are being replaced), n = 0..upto, when ``rates_h[b]`` times an hour b machines are lost together.

    A compound Poisson count over the refill time (an M/G/infinity queue with batches), by Panjer's recursion.
    """
    mean = {batch: rate * refill_h for batch, rate in rates_h.items() if rate > 0}
    chance = [math.exp(-sum(mean.values()))]
    for n in range(1, upto + 1):
        chance.append(sum(batch * m * chance[n - batch] for batch, m in mean.items() if batch <= n) / n)
    return chance
