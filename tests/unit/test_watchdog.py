"""Who is stuck, and who is to blame: learned deadlines and the naming of a culprit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tmrun.core import watchdog
from tmrun.core.errors import UsageError
from tmrun.core.model import Evidence, Sign
from tmrun.core.watchdog import Blame, Limits, Place, Reading, Watch, culprits

TICK_S = 0.1


class Watched:
    """A worker whose readings are taken every TICK_S."""

    def __init__(self) -> None:
        self.now, self.reading = 100.0, Reading(Place.STEP, 1, 0, 0, 0)
        self.watch: Watch = watchdog.observe(None, self.reading, self.now)

    def look(self, seconds: float, *, ticks: bool = True, **changes: object) -> Evidence | None:
        self.reading = replace(self.reading, **changes)  # type: ignore[arg-type]
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.reading = replace(self.reading, ticks=self.reading.ticks + ticks)
            self.watch = watchdog.observe(self.watch, self.reading, self.now)
        return self.evidence()

    def evidence(self, limit: Limits | None = None) -> Evidence | None:
        found = watchdog.evidence(self.watch, limit or Limits(), self.now)
        return found and found[0]

    def train(self, steps: int, seconds: float) -> None:
        for step in range(self.reading.step + 1, self.reading.step + 1 + steps):
            assert self.look(seconds, step=step) is None


def test_a_deadline_is_learned_and_the_first_steps_teach_nothing() -> None:
    worker = Watched()
    assert worker.look(200) is None, "a first step may compile"
    worker.train(4, 1.0)
    assert worker.watch.longest < 1.5
    worker.train(10, 12.0)
    assert worker.watch.longest == pytest.approx(12, abs=0.2)
    assert worker.look(100) is None
    assert worker.look(30) is Evidence.LATE
    worker.train(1, 1.0)
    assert worker.evidence() is None, "it moved again"


def test_a_compiler_takes_as_long_as_it_takes() -> None:
    """In a first step and later on, whatever --hang-timeout says; those who wait for it are told from it."""
    limit = watchdog.limits("2")
    assert limit is not None
    for steps in (0, 10):
        worker = Watched()
        worker.train(steps, 0.5)
        worker.look(600, compiling=True)
        assert worker.evidence(limit) is None
        worker.look(1, compiling=False)
        assert worker.evidence(limit) is None, "its time begins anew"
        worker.look(20)
        assert worker.evidence(limit) is Evidence.LATE
        worker.look(1900, compiling=True)
        assert worker.evidence(limit) is Evidence.LATE, "not for ever"
    assert culprits([sign(0), sign(1, operations=0, evidence=Evidence.NONE)], 2).blame is Blame.UNCLEAR


def test_a_switch_gives_new_patience() -> None:
    worker = Watched()
    worker.train(10, 1.0)
    worker.look(1, epoch=2)
    assert worker.look(230) is None
    assert worker.look(30) is Evidence.LATE


def test_the_stronger_the_evidence_the_sooner() -> None:
    for changes, ticks, seconds, kind in (
        ({"stopped": True}, False, 1.2, Evidence.STOPPED),
        ({}, False, 60.8, Evidence.MUTE),
        ({}, True, 60.8, Evidence.LATE),
        ({"place": Place.BETWEEN}, True, 1800.8, Evidence.LATE),
    ):
        worker = Watched()
        worker.train(10, 0.1)
        assert worker.look(seconds - 0.5, ticks=ticks, **changes) is None, kind
        assert worker.look(1.0, ticks=ticks) is kind


def test_who_waits_for_a_decision_is_not_late_but_can_be_frozen() -> None:
    worker = Watched()
    worker.train(10, 1.0)
    assert worker.look(5000, place=Place.PARKED) is None
    assert worker.look(3, stopped=True, ticks=False) is Evidence.STOPPED


def test_a_watcher_that_was_away_accuses_nobody() -> None:
    worker = Watched()
    worker.train(10, 1.0)
    worker.now += 3600
    worker.look(TICK_S)
    assert worker.evidence() is None


@pytest.mark.parametrize(("text", "late_s"), [("auto", 60.0), ("7.5", 7.5), ("off", None)])
def test_the_flag(text: str, late_s: float | None) -> None:
    found = watchdog.limits(text)
    assert (found.late_s if found else None) == late_s


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_bad_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--hang-timeout"):
        watchdog.limits(text)


def test_a_given_number_comes_on_top_of_the_longest_step() -> None:
    worker = Watched()
    worker.train(10, 3.0)
    limit = watchdog.limits("4")
    assert limit is not None
    worker.look(3.5)
    assert worker.evidence(limit) is None
    worker.look(1.0)
    assert worker.evidence(limit) is Evidence.LATE


def sign(rank: int, step: int = 9, operations: int = 3, place: str = "STEP", evidence: Evidence = Evidence.LATE) -> Sign:
    return Sign(rank, place, step, operations, evidence, 61.0, "train.py:7 in forward" if rank == 2 else "")


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (sign(2, operations=1), "entered 1 of its collectives, others 3"),
        (sign(2, step=8, place="BETWEEN"), "others are in step 9"),
        (sign(2, evidence=Evidence.STOPPED), "stopped by a signal"),
        (sign(2, evidence=Evidence.MUTE), "holds the GIL"),
    ],
)
def test_the_culprit_is_named_not_the_victims(odd: Sign, why: str) -> None:
    found = culprits([sign(0), sign(1), odd, sign(3)], 4)
    assert (found.blame, found.ranks) == (Blame.RANKS, (2,))
    assert why in found.why


def test_who_skipped_a_collective_is_behind_though_it_waits_in_the_vote() -> None:
    found = culprits([sign(0), sign(1), sign(2, operations=2, place="VOTE"), sign(3)], 4)
    assert found.ranks == (2,)


def test_who_does_not_come_to_the_vote() -> None:
    others = [sign(r, place="VOTE") for r in (0, 1, 3)]
    found = culprits([*others, sign(2)], 4)
    assert (found.ranks, "others wait in its vote" in found.why, "train.py:7 in forward" in found.why) == ((2,), True, True)


def test_nobody_is_blamed_when_all_wait_at_the_same_place() -> None:
    assert culprits([sign(r) for r in range(4)], 4).blame is Blame.NOBODY


def test_a_majority_is_never_blamed() -> None:
    assert culprits([sign(r, evidence=Evidence.STOPPED if r else Evidence.LATE) for r in range(4)], 4).blame is Blame.UNCLEAR
    assert culprits([sign(0), *(sign(r, operations=1) for r in (1, 2, 3))], 4).blame is Blame.UNCLEAR


def test_who_is_behind_and_still_has_time_is_waited_for() -> None:
    saving = sign(2, step=8, place="BETWEEN", evidence=Evidence.NONE)
    found = culprits([sign(0), sign(1), saving, sign(3)], 4)
    assert (found.blame, found.ranks) == (Blame.UNCLEAR, ())
    assert "rank 2 between two steps, after step 8" in found.why


def test_not_all_are_heard() -> None:
    assert culprits([sign(0), sign(1), sign(2, operations=1)], 4).blame is Blame.UNCLEAR


def test_a_loop_that_is_over_is_told_of_after_a_moment() -> None:
    worker = Watched()
    worker.train(10, 0.1)
    assert worker.look(1.5, place=Place.DONE) is None
    assert worker.look(1.0) is Evidence.LEFT
    assert worker.look(5000) is Evidence.LEFT, "it may save for long, and is never late"


def gone(rank: int, step: int) -> Sign:
    return sign(rank, step=step, place="DONE", evidence=Evidence.LEFT)


def test_who_left_the_loop_before_the_others_is_named_even_if_not_all_are_heard() -> None:
    found = culprits([sign(0), gone(2, 8)], 4)
    assert (found.blame, found.ranks) == (Blame.PROGRAM, (2,))
    assert found.why == "rank 2 left the loop after step 8 at train.py:7 in forward, while rank 0 waits in step 9"


@pytest.mark.parametrize("late", [{}, {"operations": 1}, {"place": "VOTE"}])
def test_in_the_last_step_nobody_is_blamed(late: dict[str, object]) -> None:
    """Those who have done it need nobody any more, and nobody waits for the last one: it may save in its step."""
    found = culprits([gone(0, 9), gone(1, 9), gone(2, 9), replace(sign(3), **late)], 4)  # type: ignore[arg-type]
    assert (found.blame, found.ranks) == (Blame.UNCLEAR, ())
    assert "nobody waits for it" in found.why


def test_a_frozen_worker_is_blamed_whoever_has_left() -> None:
    assert culprits([gone(0, 9), sign(1, evidence=Evidence.STOPPED)], 2).ranks == (1,)
