"""Late transactions: an agent decides, and before its request reaches the store the world goes on without it.

This is what the guards are for. ``play`` runs a story; its ``k``-th transaction (of one name) is held back while an interlude happens,
then it arrives; at the end everything is healed and the job must train.
"""

from __future__ import annotations

from collections.abc import Callable

from world import Agent, World

from tmrun.core.model import Host
from tmrun.core.txn import Txn

Story = Callable[[World], None]
Interlude = Callable[[World, Agent], None]


# -- stories
def launch(world: World) -> None:
    _until(world, world.settled)


def drain(world: World) -> None:
    _until(world, world.settled)
    world.drain("node0")
    _until(world, world.settled)


def crash(world: World) -> None:
    _until(world, world.settled)
    world.kill_worker("node1")
    _until(world, world.settled)


def lost_host(world: World) -> None:
    _until(world, world.settled)
    world.kill_agent("node1")
    _until(world, world.settled)


def early_crash(world: World) -> None:
    _until(world, lambda: any(w.state == "start" for w in world.training.living()))
    for name in world.agents:
        world.kill_worker(name)
    _until(world, world.settled)


def cancelled_drain(world: World) -> None:
    _until(world, world.settled)
    world.drain("node1")
    _until(world, lambda: world.job().open_migration is not None)
    world.take_back("node1")
    _until(world, world.settled)


def _until(world: World, reached: Callable[[], bool]) -> None:
    """At most a while: what is waited for may have passed in an interlude."""
    for _ in range(60):
        if reached():
            return
        for _ in range(4):
            world.round()
        world.advance(1)


STORIES: dict[str, Story] = {f.__name__: f for f in (launch, drain, crash, lost_host, early_crash, cancelled_drain)}


# -- interludes
def _go_on(world: World, seconds: int) -> None:
    for _ in range(seconds + 1):
        for _ in range(12):
            world.round()
        if seconds:
            world.advance(1)


def others_go_on(world: World, me: Agent) -> None:
    _go_on(world, 0)


def my_lease_is_revoked(world: World, me: Agent) -> None:
    world.store.revoke(me.node.lease)
    _go_on(world, 25)


def my_lease_is_revoked_just_now(world: World, me: Agent) -> None:
    world.store.revoke(me.node.lease)
    _go_on(world, 0)


def i_am_cut_off(world: World, me: Agent) -> None:
    me.store.partitioned = True
    _go_on(world, 35)
    me.store.partitioned = False


def i_die(world: World, me: Agent) -> None:
    world.kill_agent(me.host)
    world.bury(me.host)
    _go_on(world, 25)


def i_die_and_restart(world: World, me: Agent) -> None:
    world.kill_agent(me.host)
    world.bury(me.host)
    world.add_host(me.host)
    _go_on(world, 3)


def standbys_die(world: World, me: Agent) -> None:
    current = world.job().map
    for name, agent in list(world.agents.items()):
        if agent is not me and agent.alive and current and current.slot_of_host(Host(name)) is None:
            world.kill_agent(name)
            world.bury(name)
    _go_on(world, 0)


def standbys_die_and_restart(world: World, me: Agent) -> None:
    names = [n for n, a in world.agents.items() if a.alive]
    standbys_die(world, me)
    for name in names:
        if not world.agents[name].alive:
            world.add_host(name)
    _go_on(world, 1)


def standbys_are_drained(world: World, me: Agent) -> None:
    current = world.job().map
    for name in world.agents:
        if current and current.slot_of_host(Host(name)) is None:
            world.drain(name)
    _go_on(world, 0)


def standbys_are_cordoned(world: World, me: Agent) -> None:
    current = world.job().map
    for name in world.agents:
        if current and current.slot_of_host(Host(name)) is None:
            world.cordon(name)


def the_job_is_paused(world: World, me: Agent) -> None:
    world.pause()


def seats_die_and_restart(world: World, me: Agent) -> None:
    current = world.job().map
    for name, agent in list(world.agents.items()):
        if agent is not me and agent.alive and current and current.slot_of_host(Host(name)) is not None:
            world.kill_agent(name)
            world.bury(name)
            world.add_host(name)
    _go_on(world, 2)


def workers_die(world: World, me: Agent) -> None:
    for name, agent in world.agents.items():
        if agent is not me:
            world.kill_worker(name)
    _go_on(world, 2)


def leader_is_replaced(world: World, me: Agent) -> None:
    leader = world.job().leader
    if leader is not None:
        world.store.revoke(world.agents[leader.value.host].node.lease)
    _go_on(world, 2)


def drains_are_cancelled(world: World, me: Agent) -> None:
    for host in sorted(world.job().admins):
        world.take_back(host)
    _go_on(world, 0)


def a_seat_is_drained(world: World, me: Agent) -> None:
    current = world.job().map
    if current is not None:
        world.drain(next((s.host for s in current.seats if s.host != me.host), current.seats[0].host))
    _go_on(world, 2)


def only_an_election(world: World, me: Agent) -> None:
    leader = world.job().leader
    if leader is None:
        return
    world.store.revoke(world.agents[leader.value.host].node.lease)
    for name in sorted(world.agents):
        for _ in range(4):
            world.deliver(name)
            if "is elected" in world.step_agent(name):
                return


def only_new_lives(world: World, me: Agent) -> None:
    """Every other agent restarts, and nobody has noticed yet."""
    for name, agent in list(world.agents.items()):
        if agent is not me and agent.alive:
            world.kill_agent(name)
            world.bury(name)
            world.add_host(name)
            world.deliver(name)
            world.step_agent(name)


def my_next_life(world: World, me: Agent) -> None:
    world.kill_agent(me.host)
    world.bury(me.host)
    world.add_host(me.host)
    world.deliver(me.host)
    world.step_agent(me.host)


INTERLUDES: dict[str, Interlude] = {
    f.__name__: f
    for f in (
        others_go_on, my_lease_is_revoked, my_lease_is_revoked_just_now, i_am_cut_off, i_die, i_die_and_restart, standbys_die,
        standbys_die_and_restart, standbys_are_drained, standbys_are_cordoned, the_job_is_paused,
        seats_die_and_restart, workers_die, leader_is_replaced, drains_are_cancelled,
        a_seat_is_drained, only_an_election, only_new_lives, my_next_life,
    )
}  # fmt: skip


def play(story: str, interlude: str, k: int, name: str = "") -> bool:
    """False when the story has no ``k``-th such transaction. Raises Violation or AssertionError."""
    world = World(4)
    seen = 0

    def late(agent: Agent, txn: Txn) -> None:
        nonlocal seen
        if not txn.name.startswith(name):
            return
        seen += 1
        if seen == k + 1:
            world.late = None
            agent.frozen = True
            INTERLUDES[interlude](world, agent)
            agent.frozen = False

    world.late = late
    STORIES[story](world)
    world.late = None
    if seen <= k:
        return False
    world.heal()
    world.run()
    return True
