"""Figures of the bench from made-up step records."""

from __future__ import annotations

import pytest

from bench.compare import measure
from bench.compare.measure import Record

EVENT = 3.05


def run(steps: range, start: float, ranks: tuple[int, ...] = (0, 1), pace: float = 0.1, world: int | None = None) -> list[Record]:
    """All ranks do these steps, one every ``pace`` seconds, the higher ranks a little later."""
    return [
        Record(f"node{r}", 100 + r, r, world or len(ranks), s, start + i * pace, start + (i + 1) * pace + r / 1000, f"{s}.{r}")
        for i, s in enumerate(steps)
        for r in ranks
    ]


def test_a_restart_from_a_checkpoint() -> None:
    """Steps 0-29 end at 0.1 ... 3.0; the restart redoes 20-29 from 13.0 on, so that step 30 ends at 14.1."""
    found = measure.figures([*run(range(30), 0.0), *run(range(20, 50), 13.0)], EVENT)
    assert found.step_s == pytest.approx(0.1)
    assert found.downtime_s == pytest.approx(14.1 - 3.0 - 0.1)
    assert (found.redone, found.new_steps, found.world_min) == (10, 20, 2)
    assert found.excess_s == pytest.approx(11.0)


def test_a_step_counts_when_its_last_rank_has_done_it() -> None:
    """Rank 0 had finished step 30 just before the event, rank 1 was killed in it: step 30 is new, and nothing is redone."""
    early = Record("node0", 100, 0, 2, 30, 3.0, 3.04, "x")
    found = measure.figures([*run(range(30), 0.0), early, *run(range(30, 50), 4.0)], EVENT)
    assert found.downtime_s == pytest.approx(4.101 - 3.001 - 0.1)
    assert found.redone == 0


def test_a_shrinking_world() -> None:
    found = measure.figures([*run(range(30), 0.0), *run(range(30, 50), 5.0, ranks=(0,))], EVENT)
    assert found.downtime_s == pytest.approx(5.1 - 3.001 - 0.1)
    assert found.world_min == 1


def test_a_drain_pauses_later() -> None:
    """Ten steps after the request the pause comes; the steps before it count as none."""
    found = measure.figures([*run(range(40), 0.0), *run(range(40, 60), 4.3)], EVENT)
    assert found.downtime_s == pytest.approx(0.3)
    assert found.redone == 0


def test_no_recovery() -> None:
    found = measure.figures(run(range(30), 0.0), EVENT)
    assert (found.downtime_s, found.new_steps) == (None, 0)


def test_a_straggler_is_a_slowdown() -> None:
    found = measure.figures([*run(range(30), 0.0), *run(range(30, 60), 3.0, pace=0.15)], EVENT)
    assert found.slowdown == pytest.approx(1.5)


def test_settled_needs_new_steps() -> None:
    records = [*run(range(30), 0.0), *run(range(20, 35), 13.0)]
    assert not measure.settled(records, EVENT, 6)
    assert measure.settled([*records, *run(range(35, 36), 15.0)], EVENT, 6)


def test_losses_tell_an_exact_continuation() -> None:
    records = run(range(30), 0.0)
    assert measure.consistent([*records, *run(range(20, 30), 13.0)])
    other = Record("node0", 100, 0, 2, 25, 14.0, 14.1, "another loss")
    assert not measure.consistent([*records, other])
    assert measure.probe(records) == {0: "0.0", 10: "10.0", 20: "20.0"}
