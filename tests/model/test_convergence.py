"""Stop after every effect: whoever has just executed the k-th effect dies (or the coordinator does); the job must train again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from world import World


def _drain(world: World) -> None:
    world.drain("node1")


def _crash(world: World) -> None:
    world.kill_worker("node1")


def _lost(world: World) -> None:
    world.kill_agent("node1")
    world.bury("node1")


def _effects(world: World, count: int) -> str | None:
    """Run until ``count`` effects of agents are executed; the host of the last one, None when nothing is left to do."""
    done = quiet = 0
    while quiet < 12:
        quiet += 1
        for name in sorted(world.agents):
            world.deliver(name)
            if world.step_agent(name):
                done, quiet = done + 1, 0
                if done == count:
                    return name
        for worker in world.training.living():
            world.step_worker(worker)
    return None


@pytest.mark.parametrize("buried", [True, False], ids=["buried", "silent"])
@pytest.mark.parametrize("victim", ["executor", "coordinator"])
@pytest.mark.parametrize("story", [_drain, _crash, _lost], ids=["drain", "crash", "lost"])
def test_stop_after_every_effect(story: Callable[[World], None], victim: str, buried: bool) -> None:
    effects = 0
    while True:
        effects += 1
        world = World(5)
        world.run()
        story(world)
        name = _effects(world, effects)
        if name is None:
            break
        leader = world.job().leader
        if victim == "coordinator" and leader is not None:
            name = leader.value.host
        if world.agents[name].alive:
            world.kill_agent(name)
            if buried:
                world.bury(name)
        world.heal()
        world.run()
        assert world.job().end is None, f"after effect {effects}: {world.job().end}"
        assert all(op.state.value == "done" for op in world.job().ops.values()), f"after effect {effects}: {world.job().ops}"
    assert effects > 10


@pytest.mark.parametrize("story", [_drain, _crash], ids=["drain", "crash"])
def test_one_fault_costs_no_restart(story: Callable[[World], None]) -> None:
    """Stayers go on in their processes: the generation stays 1."""
    world = World(5)
    world.run()
    story(world)
    world.run()
    current = world.job().map
    assert current is not None
    assert (current.generation, current.epoch) == (1, 2)
