"""The few things about pictures that can be wrong without being seen."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tmrun.sim import svg


def test_labels_keep_their_distance_and_stay_inside() -> None:
    for wanted in ([10.0, 10, 10, 11], [95.0, 96, 97], [0.0, 50, 100], [99.0]):
        placed = svg.spread(wanted, 9, 0, 100)
        assert all(b - a >= 9 - 1e-9 for a, b in pairwise(sorted(placed))), (wanted, placed)
        assert all(-1e-9 <= y <= 100 + 1e-9 for y in placed), (wanted, placed)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7.3), (0.93, 1.0), (0, 1.3e6), (5, 5)])
def test_ticks_are_few_and_within(low: float, high: float) -> None:
    found = svg.ticks(low, high)
    assert 1 <= len(found) <= 11 and all(low - 1e-9 <= t <= high + 1e-9 for t in found)


def test_words_cannot_break_the_file() -> None:
    canvas = svg.Canvas(10, 10)
    canvas.text(0, 0, "<a & b>")
    canvas.rect(0, 0, 1, 1, "red", tip='"<&>"')
    assert [e.text for e in ElementTree.fromstring(canvas.render()).iter() if e.text and e.text.strip()] == ['"<&>"', "<a & b>"][::-1]
