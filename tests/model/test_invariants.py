"""The protocol under every fault that hypothesis can think of; ``Audit`` checks the invariants after every micro-step.

Each run starts from a job that trains, goes through a random history of steps and faults, is then healed, and must train again
(invariant 15). ``pytest -m chaos`` runs far more and longer histories.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from walker import drains, walk
from world import World

from tmrun.core.membership import fold
from tmrun.core.model import Host, Verb

INDEX = st.integers(0, 5)


class Job(RuleBasedStateMachine):
    """Micro-steps and faults in any order."""

    world: World

    @initialize(hosts=st.integers(3, 5), warm=st.booleans())
    def launch(self, hosts: int, warm: bool) -> None:
        self.world = World(hosts)
        if warm:
            self.world.run()

    def name(self, index: int) -> str:
        names = sorted(self.world.agents)
        return names[index % len(names)]

    # -- what happens by itself
    @rule(index=INDEX, events=st.sampled_from((0, 1, 100)), steps=st.integers(1, 6))
    def agent_acts(self, index: int, events: int, steps: int) -> None:
        self.world.deliver(self.name(index), events)
        for _ in range(steps):
            self.world.step_agent(self.name(index))

    @rule(index=INDEX, steps=st.integers(1, 4))
    def worker_acts(self, index: int, steps: int) -> None:
        living = self.world.training.living()
        for _ in range(steps if living else 0):
            self.world.step_worker(living[index % len(living)])

    @rule(rounds=st.integers(1, 8))
    def all_act(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.round()

    @rule(seconds=st.sampled_from((1, 3, 7, 11)))
    def time_passes(self, seconds: int) -> None:
        self.world.advance(seconds)

    # -- what goes wrong
    @rule(index=INDEX, buried=st.booleans())
    def kill_agent(self, index: int, buried: bool) -> None:
        name = self.name(index)
        if self.world.agents[name].alive:
            self.world.kill_agent(name)
            if buried:
                self.world.bury(name)

    @rule(index=INDEX)
    def restart_agent(self, index: int) -> None:
        if not self.world.agents[self.name(index)].alive:
            self.world.add_host(self.name(index))

    @rule(index=INDEX)
    def kill_worker(self, index: int) -> None:
        living = self.world.training.living()
        if living:
            self.world.training.end(living[index % len(living)], 137)

    @rule(index=INDEX)
    def lose_a_step(self, index: int) -> None:
        living = [w for w in self.world.training.living() if w.broken]
        if living:
            living[index % len(living)].unlucky = True

    @rule(index=INDEX, cut=st.booleans())
    def partition(self, index: int, cut: bool) -> None:
        agent = self.world.agents[self.name(index)]
        if agent.alive:
            agent.store.partitioned = cut

    @rule(index=INDEX, frozen=st.booleans())
    def freeze(self, index: int, frozen: bool) -> None:
        agent = self.world.agents[self.name(index)]
        if agent.alive:
            agent.frozen = agent.store.partitioned = frozen

    @rule(index=INDEX)
    def revoke(self, index: int) -> None:
        self.world.store.revoke(self.world.agents[self.name(index)].node.lease)

    @rule(index=INDEX, applied=st.booleans())
    def lose_answer(self, index: int, applied: bool) -> None:
        self.world.lose_answer(self.name(index), applied=applied)

    @rule(index=INDEX)
    def duplicate(self, index: int) -> None:
        for watch in self.world.agents[self.name(index)].store._watches:
            watch.duplicate()

    # -- what people do
    @rule(indices=st.sets(INDEX, min_size=1, max_size=2))
    def drain(self, indices: set[int]) -> None:
        self.world.drain(*sorted({self.name(i) for i in indices}))

    @rule(index=INDEX)
    def replace(self, index: int) -> None:
        self.world.drain(self.name(index), verb=Verb.REPLACE)

    @rule(index=INDEX)
    def drain_or_else(self, index: int) -> None:
        self.world.drain(self.name(index), force_after_s=3.0)

    @rule(index=INDEX)
    def term(self, index: int) -> None:
        self.world.term(self.name(index))

    @rule(index=INDEX, wanted=st.booleans())
    def cordon(self, index: int, wanted: bool) -> None:
        self.world.cordon(self.name(index), wanted=wanted)

    @rule(wanted=st.booleans())
    def pause(self, wanted: bool) -> None:
        self.world.pause(wanted=wanted)

    @rule(index=INDEX)
    def undrain(self, index: int) -> None:
        self.world.take_back(self.name(index))

    @rule()
    def new_host(self) -> None:
        if len(self.world.agents) < 6:
            self.world.add_host(f"node{len(self.world.agents)}")

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.heal()
            self.world.run()


def _search(examples: int, steps: int, *, derandomize: bool) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=checks,
        database=None,
    )
    run_state_machine_as_test(Job, settings=how)  # type: ignore[no-untyped-call]


def test_no_history_breaks_an_invariant() -> None:
    _search(60, 60, derandomize=True)


@pytest.mark.parametrize("seed", range(0, 120, 12))
def test_random_walks(seed: int) -> None:
    for one in range(seed, seed + 12):
        rng = random.Random(one)
        walk(one, rng.choice((150, 400, 800)), rng.choice((0.02, 0.05, 0.1, 0.15)), hosts=rng.choice((3, 4, 5)))


def test_drains_one_after_another_with_slow_stayers() -> None:
    for seed in range(30):
        drains(seed)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_many_histories(request: pytest.FixtureRequest) -> None:
    in_full = "chaos" in (request.config.getoption("-m") or "")
    _search(1500 if in_full else 10, 150, derandomize=False)
    for seed in range(10_000, 14_000 if in_full else 10_020):
        walk(seed, random.Random(seed).choice((400, 1200)), 0.06, hosts=5)


def test_a_store_outage_alone_kills_nothing() -> None:
    """Invariant 13: as long as steps complete, nobody is fenced, elected or replaced."""
    world = World(3)
    world.run()
    pids = {w.pid for w in world.training.living()}
    for agent in world.agents.values():
        agent.store.partitioned = True
    for _ in range(10 * world.spec.lease_ttl_s):
        world.advance(1)
        world.round()
        world.round()
    assert {w.pid for w in world.training.living()} == pids
    for agent in world.agents.values():
        agent.store.partitioned = False
    world.run()
    assert (world.job().epoch, {w.pid for w in world.training.living()}) == (1, pids)


@pytest.mark.parametrize("order", ["twice", "late", "listed"])
def test_watch_events_that_repeat_or_come_late_lead_to_the_same_snapshot(order: str) -> None:
    """Invariant 16: an agent's snapshot is what the store says of what concerns it, however the events came."""
    world = World(3)
    world.run()
    agent = world.agents["node2"]
    world.drain("node0")
    for _ in range(200):
        for name in ("node0", "node1"):
            world.deliver(name)
            world.step_agent(name)
        if order == "twice":
            for watch in agent.store._watches:
                watch.duplicate()
        if order != "late":
            world.deliver("node2", 1)
    if order == "listed":
        world.store.compact()
    world.deliver("node2")
    seen = [world.store.listing(prefix).entries for prefix in (world.keys.common, world.keys.node("node2"))]
    assert agent.job() == fold(world.keys, [kv for entries in seen for kv in entries])
    assert agent.job().draining(Host("node0"))
