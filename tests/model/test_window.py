"""A rank lost at any moment between a drain's commit and the end of its handover: nobody is restarted, the request is carried out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from training import LEAD
from world import SPEC, World

from tmrun.core.model import OpState

ROUNDS = 2 * (LEAD + 3)
"""A step takes two rounds; the last ones are after the handover."""


@pytest.mark.parametrize("lost", ["leaver", "stayer", "joiner"])
@pytest.mark.parametrize("how", ["worker", "agent", "agent, seen"])
def test_a_rank_is_lost_after_a_drains_commit(lost: str, how: str) -> None:
    phases = set()
    for rounds in range(ROUNDS):
        world = World(7, replace(SPEC, nnodes=3, standby=4))
        world.run()
        op = world.drain("node1")
        world.run(until="commit epoch 2")
        for _ in range(rounds):
            world.round()
        current = world.job().map
        assert current is not None
        host = {"leaver": "node1", "stayer": "node2", "joiner": current.moves[0].joiner.host}[lost]
        phases |= {w.state for w in world.training.living() if w.seat.host == host}
        if how == "worker":
            world.kill_worker(host)
        else:
            world.kill_agent(host)
        if how == "agent, seen":
            world.bury(host)
        world.run()
        job = world.job()
        assert job.map is not None
        assert job.map.generation == 1, f"after {rounds} rounds: {job.map.reason}"
        assert job.ops[op].state is OpState.DONE
    assert "loop" in phases or lost == "joiner", "before the stop step"
    assert phases & {"hand", "receive", "stop"}, "and after it"
