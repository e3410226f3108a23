"""A seeded random walk through a simulated job: a quick way to many interleavings (``test_invariants`` has the one that shrinks)."""

from __future__ import annotations

import random
from collections.abc import Callable

from world import World

from tmrun.core.model import Verb

Fault = Callable[[World, random.Random], str]


def _host(world: World, rng: random.Random, *, alive: bool = True) -> str:
    names = [n for n, a in world.agents.items() if a.alive is alive]
    return rng.choice(names) if names else ""


def _kill_agent(world: World, rng: random.Random) -> str:
    name = _host(world, rng)
    if not name or sum(a.alive for a in world.agents.values()) < 2:
        return ""
    world.kill_agent(name)
    if rng.random() < 0.5:
        world.bury(name)
        return f"kill agent {name}, buried"
    return f"kill agent {name}"


def _kill_worker(world: World, rng: random.Random) -> str:
    living = world.training.living()
    if not living:
        return ""
    worker = rng.choice(living)
    world.training.end(worker, 137)
    return f"kill {worker}"


def _partition(world: World, rng: random.Random) -> str:
    agent = world.agents[_host(world, rng) or next(iter(world.agents))]
    agent.store.partitioned = not agent.store.partitioned and agent.alive
    return f"{'cut' if agent.store.partitioned else 'heal'} {agent.host}"


def _freeze(world: World, rng: random.Random) -> str:
    agent = world.agents[_host(world, rng) or next(iter(world.agents))]
    agent.frozen = not agent.frozen and agent.alive
    agent.store.partitioned = agent.frozen
    return f"{'freeze' if agent.frozen else 'thaw'} {agent.host}"


def _revoke(world: World, rng: random.Random) -> str:
    name = _host(world, rng)
    if not name:
        return ""
    world.store.revoke(world.agents[name].node.lease)
    return f"revoke the lease of {name}"


def _lose(world: World, rng: random.Random) -> str:
    name, applied = _host(world, rng), rng.random() < 0.5
    if not name:
        return ""
    world.lose_answer(name, applied=applied)
    return f"{name}'s next answer is lost ({'applied' if applied else 'not applied'})"


def _unlucky(world: World, rng: random.Random) -> str:
    loop = [w for w in world.training.living() if w.state == "loop"]
    if not loop or not (dead := [w for w in loop if w.broken or world.training._alone(w)]):
        return ""
    worker = rng.choice(dead)
    worker.unlucky = True
    return f"unlucky {worker}"


def _hang(world: World, rng: random.Random) -> str:
    name = _host(world, rng)
    return f"hang {name}" if name and world.hang(name) else ""


def _drain(world: World, rng: random.Random) -> str:
    names = rng.sample(sorted(world.agents), k=1 if rng.random() < 0.8 else 2)
    return f"drain {names}: {world.drain(*names) or 'refused'}"


def _replace(world: World, rng: random.Random) -> str:
    name = rng.choice(sorted(world.agents))
    return f"replace {name}: {world.drain(name, verb=Verb.REPLACE) or 'refused'}"


def _drain_by(world: World, rng: random.Random) -> str:
    name = rng.choice(sorted(world.agents))
    return f"drain {name} within 3 s: {world.drain(name, force_after_s=3.0) or 'refused'}"


def _term(world: World, rng: random.Random) -> str:
    name = _host(world, rng)
    if not name:
        return ""
    world.term(name)
    return f"SIGTERM to {name}"


def _cordon(world: World, rng: random.Random) -> str:
    name, wanted = rng.choice(sorted(world.agents)), rng.random() < 0.6
    return f"{'cordon' if wanted else 'uncordon'} {name}: {world.cordon(name, wanted=wanted)}"


def _pause(world: World, rng: random.Random) -> str:
    wanted = world.job().pause is None
    return f"{'pause' if wanted else 'resume'}: {world.pause(wanted=wanted)}"


def _undrain(world: World, rng: random.Random) -> str:
    return world.take_back(rng.choice(sorted(world.agents)))


def _restart(world: World, rng: random.Random) -> str:
    name = _host(world, rng, alive=False)
    if not name:
        return ""
    world.add_host(name)
    return f"restart {name}"


def _new_host(world: World, rng: random.Random) -> str:
    if len(world.agents) >= 6:
        return ""
    return f"new host {world.add_host(f'node{len(world.agents)}').host}"


def _again(world: World, rng: random.Random) -> str:
    for watch in world.agents[_host(world, rng) or next(iter(world.agents))].store._watches:
        watch.duplicate()
    return "an event comes twice"


def _compact(world: World, rng: random.Random) -> str:
    world.store.compact()
    return "compaction"


FAULTS: dict[Fault, int] = {
    _kill_agent: 6,
    _kill_worker: 6,
    _partition: 6,
    _freeze: 3,
    _revoke: 3,
    _lose: 6,
    _unlucky: 8,
    _hang: 4,
    _drain: 5,
    _undrain: 4,
    _replace: 2,
    _drain_by: 2,
    _term: 3,
    _cordon: 3,
    _pause: 3,
    _restart: 6,
    _new_host: 2,
    _again: 2,
    _compact: 1,
}


def walk(
    seed: int,
    steps: int = 400,
    fault_share: float = 0.04,
    hosts: int = 4,
    log: list[str] | None = None,
    *,
    heal: bool = True,
    fresh: float = 0.7,
) -> World:
    """One walk; raises Violation. ``fresh``: how often an agent hears the news before it acts. ``log`` collects what happened."""
    rng = random.Random(seed)
    world = World(hosts)
    log = log if log is not None else []
    log += world.run() if rng.random() < 0.8 else []
    faults, weights = list(FAULTS), list(FAULTS.values())
    for _ in range(steps):
        dice = rng.random()
        if dice < fault_share:
            log.append("FAULT " + rng.choices(faults, weights)[0](world, rng))
            world.audit.check()
        elif dice < fault_share + 0.03:
            seconds = rng.choice((1, 2, 5, 11))
            log.append(f"advance {seconds}")
            world.advance(seconds)
        elif dice < 0.55:
            name = rng.choice(sorted(world.agents))
            if rng.random() < fresh:
                world.deliver(name, rng.choice((1, 100)))
            text = world.step_agent(name)
            if text:
                log.append(f"{name}: {text}")
        else:
            living = world.training.living()
            if living:
                worker = rng.choice(living)
                text = world.step_worker(worker)
                if text:
                    log.append(f"  {worker.seat.host} rank {worker.rank} {text}")
    if heal:
        log.append("HEAL")
        world.heal()
        log += world.run()
    return world


def drains(seed: int, count: int = 4) -> World:
    """Drains that follow each other at once, while some agents lag behind."""
    rng = random.Random(seed)
    world = World(5)
    world.run()
    for _ in range(count):
        current = world.job().map
        assert current is not None
        world.drain(rng.choice(current.seats).host)
        for _ in range(rng.choice((20, 60, 150))):
            name = rng.choice(sorted(world.agents))
            if rng.random() < 0.8:
                world.deliver(name)
            world.step_agent(name)
            for worker in world.training.living():
                world.step_worker(worker)
        for host in sorted(world.job().admins):
            if not any(host in op.hosts for op in world.job().open_ops()):
                world.take_back(host)
    world.heal()
    world.run()
    return world
