"""Which node computes slower than the others: from each node's own computing time a step, waiting for others left out.

A node is *slow* when it needs ``SLOW_RATIO`` times what the middle node needs, stands out of the spread of the others (median and MAD, so
that one or two slow ones do not shift the yardstick), and does so in ``IN_A_ROW`` looks. It is well again when it has not been slow for as
many. With two nodes the faster one is the yardstick. May not know: how times are measured, what is done about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tmrun.core.model import Host

SLOW_RATIO = 1.12
SPREADS = 4.0
"""Robust standard deviations (1.4826 MAD) by which it stands out."""
LEAST_SPREAD = 0.02
"""Of the median: identical nodes are never that equal."""
IN_A_ROW = 3


def ratios(busy_s: Mapping[Host, float]) -> dict[Host, float]:
    """Nodes that stand out now -> their time as a multiple of the middle node's. ``busy_s``: host -> computing seconds a step."""
    values = sorted(v for v in busy_s.values() if v > 0)
    if len(values) < 2:
        return {}
    middle = _lower_median(values)
    spread = max(1.4826 * _lower_median(sorted(abs(v - middle) for v in values)), LEAST_SPREAD * middle)
    return {h: v / middle for h, v in busy_s.items() if v > SLOW_RATIO * middle and v - middle > SPREADS * spread}


def _lower_median(values: list[float]) -> float:
    return values[(len(values) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Slow:
    """What is known of the nodes: how often in a row each stood out (below 0: did not), and who counts as slow, by what factor."""

    rows: Mapping[Host, int] = field(default_factory=dict)
    slow: Mapping[Host, float] = field(default_factory=dict)


def look(before: Slow, busy_s: Mapping[Host, float]) -> Slow:
    """Fold one look at all nodes; those that are not in it any more are forgotten."""
    now = ratios(busy_s)
    rows = {h: _row(before.rows.get(h, 0), stands_out=h in now) for h in busy_s}
    slow = {h: now.get(h, before.slow.get(h, 0.0)) for h in busy_s if rows[h] >= IN_A_ROW or (h in before.slow and rows[h] > -IN_A_ROW)}
    return Slow(rows, slow)


def _row(row: int, *, stands_out: bool) -> int:
    return max(row, 0) + 1 if stands_out else min(row, 0) - 1


def told(slow: Slow) -> str:
    """For people; empty when nobody is slow."""
    return "; ".join(f"{h} computes {r:.2f} times as long as the others" for h, r in sorted(slow.slow.items()))
