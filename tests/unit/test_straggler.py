"""Slow nodes: found at 20 % and at three times, not invented from noise."""

from __future__ import annotations

import random

import pytest

from tmrun.core import straggler
from tmrun.core.model import Host
from tmrun.core.straggler import IN_A_ROW, Slow


def looks(factor: float, nodes: int, count: int = 40, noise: float = 0.03, seed: int = 1) -> list[Slow]:
    """A job whose last node needs ``factor`` times as long, with noise."""
    dice, slow, found = random.Random(seed), Slow(), []
    for _ in range(count):
        busy = {Host(f"n{i}"): dice.gauss(1.0, noise) * (factor if i == nodes - 1 else 1.0) for i in range(nodes)}
        slow = straggler.look(slow, busy)
        found.append(slow)
    return found


@pytest.mark.parametrize("nodes", [2, 3, 4, 64])
@pytest.mark.parametrize("factor", [1.2, 3.0])
def test_a_slow_node_is_found_and_only_it(nodes: int, factor: float) -> None:
    found = looks(factor, nodes, noise=0.015)
    assert not found[IN_A_ROW - 2].slow
    assert {h for s in found for h in s.slow} == {f"n{nodes - 1}"}
    assert found[-1].slow[Host(f"n{nodes - 1}")] == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_noise_accuses_nobody(seed: int) -> None:
    assert not any(s.slow for s in looks(1.0, 16, count=200, noise=0.05, seed=seed))


def test_one_bad_look_is_not_slow() -> None:
    slow = Slow()
    for at in range(20):
        slow = straggler.look(slow, {Host("a"): 1.0, Host("b"): 1.0, Host("c"): 5.0 if at % 3 == 0 else 1.0})
        assert not slow.slow


def test_it_recovers_and_is_forgotten() -> None:
    slow = looks(3.0, 4)[-1]
    well = {Host(f"n{i}"): 1.0 for i in range(4)}
    for _ in range(IN_A_ROW - 1):
        slow = straggler.look(slow, well)
        assert slow.slow
    assert not straggler.look(slow, well).slow
    assert Host("n3") not in straggler.look(slow, {Host("n0"): 1.0, Host("n1"): 1.0}).rows


def test_what_people_read() -> None:
    assert straggler.told(looks(3.0, 4)[-1]).startswith("n3 computes ")
    assert straggler.told(Slow()) == ""
    assert straggler.ratios({Host("a"): 1.0}) == {}
    assert straggler.ratios({Host("a"): 0.0, Host("b"): 1.0}) == {}
