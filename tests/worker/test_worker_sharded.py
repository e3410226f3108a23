"""Sharded training: the joiner gets its own shard from the one rank that holds the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

from tmrun import wire

HSDP = Path(__file__).with_name("hsdp.py")
Make = Callable[..., Cluster]
Same = Callable[..., None]


@pytest.mark.parametrize("point", ["backward", "after_vote"])
def test_killed(cluster: Make, same: Same, point: str) -> None:
    job = cluster(4, HSDP, TMRUN_TEST_KILL=f"1:6:{point}")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == (6 if point == "backward" else 7)
    assert {r: job.expect(w, wire.Prepared).covers for r, w in job.ranks.items() if w is not joiner} == {0: (), 2: (), 3: (1,)}
    same(job, unlogged=((1, 6),))


def test_drained(cluster: Make, same: Same) -> None:
    job = cluster(4, HSDP)
    joiner = job.standby(2)
    job.start()
    job.reach(4)
    job.drain(2, joiner)
    same(job)
