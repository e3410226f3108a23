"""Every transaction of every story arrives late, after every interlude: no invariant breaks, and the job trains again."""

from __future__ import annotations

import pytest
from late import INTERLUDES, STORIES, play
from training import Violation


@pytest.mark.parametrize("story", STORIES)
def test_a_late_transaction_does_no_harm(story: str) -> None:
    _each(story, 4)


def _each(story: str, every: int) -> None:
    for offset, interlude in enumerate(INTERLUDES):
        k = offset % every
        try:
            while play(story, interlude, k):
                k += every
        except Violation as violation:
            raise AssertionError(f"{story}, {interlude}, transaction {k}") from violation


@pytest.mark.chaos
@pytest.mark.parametrize("story", STORIES)
def test_each_late_transaction(story: str, request: pytest.FixtureRequest) -> None:
    _each(story, 1 if "chaos" in (request.config.getoption("-m") or "") else 20)
