"""Failure domains, nearness and the spreading of spares."""

from __future__ import annotations

import re

import pytest

from tmrun.core import placement
from tmrun.core.errors import UsageError

R1, R2, R3 = "block=b1/rack=r1", "block=b1/rack=r2", "block=b2/rack=r3"


def test_a_place_is_a_path_of_levels() -> None:
    assert placement.place_of({"rack": "r1", "gpu": "h200", "block": "b1"}) == R1
    assert placement.place_of({"gpu": "h200"}) == ""


def test_a_domain_is_lost_when_all_of_it_failed_and_that_was_more_than_one() -> None:
    places = [R1, R1, R2, R2, R3]
    assert placement.lost(places, [0, 1]) == {R1}
    assert placement.lost(places, [0, 2]) == frozenset()
    assert placement.lost(places, [4]) == frozenset()
    assert placement.lost(places, [0, 1, 2, 3]) == {R1, R2, "block=b1"}
    assert placement.lost(["", ""], [0, 1]) == frozenset()


def test_near_is_what_shares_more_levels() -> None:
    assert [placement.distance(R1, p) for p in (R1, R2, R3, "")] == [0, 1, 2, 2]


def test_spares_are_spread_over_domains() -> None:
    places = {f"n{i}": p for i, p in enumerate([R1, R1, R1, R2, R2, R3])}
    assert placement.spares(places, 3) == ["n2", "n4", "n5"]
    assert placement.spares(places, 4)[3] == "n1"
    assert placement.spares(dict.fromkeys(["a", "b", "c"], ""), 1) == ["c"]
    assert placement.spares({}, 2) == []


def test_labels_from_names_and_files() -> None:
    pattern = placement.parse_pattern(r"^r(?P<rack>\d+)n\d+")
    assert placement.labels_in("r12n7", pattern) == {"rack": "12"}
    assert placement.labels_in("login", pattern) == {}
    text = "# racks\nr1n1 rack=r1 block=b1\nr1n2 rack=r1  # spare\n"
    assert placement.labels_from_file(text, "r1n2", "f") == {"rack": "r1"}
    assert placement.labels_from_file(text, "other", "f") == {}


@pytest.mark.parametrize("pattern", ["(", r"r\d+", r"(?P<shelf>\d+)"])
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(UsageError, match="--label-pattern"):
        placement.parse_pattern(pattern)


def test_a_bad_line_is_named() -> None:
    with pytest.raises(UsageError, match=re.escape("labels.txt:2: 'rack'")):
        placement.labels_from_file("\nn1 rack", "n1", "labels.txt")
