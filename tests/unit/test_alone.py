"""What an agent does by itself: nothing that its workers, or a store that may come back, could still save."""

from __future__ import annotations

import pytest

from tmrun.core.alone import MARGIN_S, Alone, judge
from tmrun.core.preemption import HANDOVER_S

TTL, GRACE, PATIENCE = 15.0, 30.0, 600.0


@pytest.mark.parametrize(
    ("term_s", "silent_s", "runs", "ending", "todo"),
    [
        (None, 0.1, True, False, Alone.GO_ON),
        (None, 10 * PATIENCE, True, False, Alone.GO_ON),  # workers that progress need no store
        (None, PATIENCE - 1, False, False, Alone.GO_ON),
        (None, PATIENCE + 1, False, False, Alone.GIVE_UP),
        (1.0, 0.1, True, False, Alone.GO_ON),  # it has asked for a drain
        (1.0, TTL, True, False, Alone.END_WORKERS),  # nobody can be asked
        (HANDOVER_S + 1, 0.1, True, False, Alone.END_WORKERS),  # nobody answers
        (HANDOVER_S + 1, 0.1, True, True, Alone.GO_ON),  # the grace period
        (HANDOVER_S + GRACE, 0.1, True, True, Alone.GO_ON),
        (HANDOVER_S + GRACE + MARGIN_S + 1, 0.1, True, True, Alone.LEAVE),
        (1.0, 0.1, False, True, Alone.GO_ON),  # it says that they have ended, or waits until nothing depends on it
        (1.0, TTL, False, True, Alone.LEAVE),  # it cannot say it
    ],
)
def test_alone(term_s: float | None, silent_s: float, runs: bool, ending: bool, todo: Alone) -> None:
    assert judge(term_s, silent_s, runs=runs, ending=ending, ttl_s=TTL, patience_s=PATIENCE, grace_s=GRACE) is todo


def test_a_short_patience_is_not_tried_by_the_time_between_two_renewals() -> None:
    """Of a lease of a minute they are 12 s apart, while the store answers."""
    for silent_s, todo in ((12.0, Alone.GO_ON), (60.0, Alone.GIVE_UP)):
        assert judge(None, silent_s, runs=False, ending=False, ttl_s=60.0, patience_s=10.0, grace_s=GRACE) is todo
