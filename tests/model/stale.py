"""Stray requests: an agent gives up on an answer and goes on, and its old request reaches the store afterwards.

Each case lets somebody decide on a transaction, lets the world go on *with that agent*, and then delivers it. The store must refuse it, or
it must do no harm. (``late`` holds the sender back instead.) Cases are short on purpose: each shows what one guard is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from training import require
from world import SPEC, Agent, World

from tmrun.core import planner, transactions
from tmrun.core.membership import Job
from tmrun.core.model import Kind, OpState, Resume, Run, Trouble, Vote
from tmrun.core.txn import Txn

Case = Callable[[World], None]


def _settled() -> World:
    world = World(4)
    world.run()
    return world


def _leader(world: World) -> Agent:
    leader = world.job().leader
    assert leader is not None
    return world.agents[leader.value.host]


def _holder(world: World, slot: int) -> Agent:
    current = world.job().map
    assert current is not None
    return world.agents[current.seats[slot].host]


def _standby(world: World) -> Agent:
    return world.agents[planner.standbys(world.job())[0].host]


def _until(world: World, reached: Callable[[Job], object]) -> Job:
    for _ in range(400):
        if reached(world.job()):
            return world.job()
        world.round()
        if not reached(world.job()):
            world.advance(0.25)
    raise AssertionError("the story did not get there")


def _arrives(world: World, agent: Agent, txn: Txn) -> None:
    agent.store.partitioned = False
    agent.submit(txn)
    world.audit.check()


def _relive(world: World, agent: Agent) -> None:
    """The agent's lease is dropped; it registers again, in the same life."""
    world.store.revoke(agent.node.lease)
    _until(world, lambda job: not job.alive(agent.me))
    _until(world, lambda job: job.alive(agent.me))


def elected_twice(world: World) -> None:
    """Nobody leads, two terms have passed since: the election of the first is late."""
    me = _standby(world)
    world.store.revoke(_leader(world).node.lease)
    job = world.job()
    assert job.leader is None
    stray = transactions.elect(job, me.me, me.node.lease)
    _until(world, lambda job: job.leader is not None)
    world.store.revoke(_leader(world).node.lease)
    _arrives(world, me, stray)


def elected_over_a_leader(world: World) -> None:
    me = _standby(world)
    world.store.revoke(_leader(world).node.lease)
    stray = transactions.elect(world.job(), me.me, me.node.lease)
    _until(world, lambda job: job.leader is not None)
    _arrives(world, me, stray)


def elected_without_being_a_member(world: World) -> None:
    """It has a new lease, and is not registered under it yet."""
    me = _standby(world)
    world.store.revoke(_leader(world).node.lease)
    job = world.job()
    world.store.revoke(me.node.lease)
    me._acquire()
    _arrives(world, me, transactions.elect(job, me.me, me.node.lease))


def proposed_twice(world: World) -> None:
    me, job = _leader(world), world.job()
    moves = planner.plan_moves(job, [1]).moves
    world.drain(job.map.seats[1].host if job.map else "")
    stray = transactions.propose(job, Kind.DRAIN, moves, "", "stray")
    _until(world, lambda job: job.open_migration)
    _arrives(world, me, stray)


def proposed_for_a_slot_that_is_claimed_again(world: World) -> None:
    """The holder registers and claims again between the coordinator's reading and its writing."""
    me, holder = _leader(world), _holder(world, 1)
    world.store.revoke(holder.node.lease)
    job = world.job()
    me.frozen = True
    stray = transactions.propose(job, Kind.FAILURE, planner.plan_moves(job, [1]).moves, "", "stray")
    _until(world, lambda job: 1 in job.runs)
    _arrives(world, me, stray)


def proposed_drain_of_another_life(world: World) -> None:
    me, holder, job = _leader(world), _holder(world, 1), world.job()
    stray = transactions.propose(job, Kind.DRAIN, planner.plan_moves(job, [1]).moves, "", "stray")
    world.kill_agent(holder.host)
    world.bury(holder.host)
    _arrives(world, me, stray)


def _open(world: World) -> tuple[Agent, Job]:
    """A drain all of whose votes are in, and that nobody has committed yet."""
    world.drain(_holder(world, 1).host)
    job = _until(world, lambda job: job.open_migration)
    leader = _leader(world)
    leader.frozen = True
    return leader, job


def _voted(world: World) -> tuple[Agent, Job]:
    leader, _ = _open(world)
    for _ in range(300):
        job = world.job()
        if len(job.votes) >= 3:
            break
        leader.frozen = leader.host in job.votes
        for name in sorted(world.agents):
            world.deliver(name)
            if world.agents[name].frozen:
                continue
            if world.agents[name] is leader and not job.open_migration:
                break
            world.step_agent(name)
        for worker in world.training.living():
            world.step_worker(worker)
    leader.frozen = False
    return leader, world.job()


def committed_after_its_abort(world: World) -> None:
    leader, job = _voted(world)
    assert job.open_migration is not None and len(job.votes) == 3, job.votes
    stray = transactions.commit(job, Resume(next(v.value.stop_step or 0 for v in job.votes.values())))
    assert leader.submit(transactions.abort(world.job(), "stray"))
    _arrives(world, leader, stray)


def aborted_after_its_commit(world: World) -> None:
    leader, job = _voted(world)
    assert job.open_migration is not None and len(job.votes) == 3, job.votes
    stray = transactions.abort(job, "stray")
    stop = next(v.value.stop_step or 0 for v in job.votes.values())
    assert leader.submit(transactions.commit(job, Resume(stop)))
    _arrives(world, leader, stray)


def committed_after_its_leaver_died(world: World) -> None:
    leader, job = _voted(world)
    assert job.open_migration is not None and len(job.votes) == 3, job.votes
    stop = next(v.value.stop_step or 0 for v in job.votes.values())
    stray = transactions.commit(job, Resume(stop))
    gone = job.open_migration.moves[0].leaver.host
    world.kill_agent(gone)
    world.bury(gone)
    _arrives(world, leader, stray)


def committed_after_the_slot_was_claimed_again(world: World) -> None:
    """The holder's lease was dropped; it registers and claims between the coordinator's reading of the last vote and its commit."""
    me, holder = _leader(world), _holder(world, 1)
    world.store.revoke(holder.node.lease)
    holder.frozen = True
    job = _until(world, lambda job: job.open_migration and len(job.votes) >= 2)
    me.frozen, holder.frozen = True, False
    step = max(w.next_step for v in job.votes.values() for w in v.value.workers)
    stray = transactions.commit(job, Resume(step, {1: 0}, {1: 0}))
    _until(world, lambda job: 1 in job.runs)
    _arrives(world, me, stray)


def lease_dropped_during_the_handover(world: World) -> None:
    """The store drops the leaver's lease, its run key with it, while its processes still hand over."""
    holder = _holder(world, 1)
    world.drain(holder.host)
    _until(world, lambda job: job.epoch == 2)
    world.store.revoke(holder.node.lease)
    holder.frozen = True
    for _ in range(10):
        for name in sorted(world.agents):
            world.deliver(name)
            world.step_agent(name)
    holder.frozen = False
    _until(world, lambda job: all(op.state is OpState.DONE for op in job.ops.values()))


def _comes_back(world: World, holder: Agent) -> None:
    """It registers again, with its process, and does not get further."""
    holder.frozen = False
    for _ in range(20):
        if world.job().alive(holder.me):
            break
        world.deliver(holder.host)
        world.step_agent(holder.host)
    assert world.job().alive(holder.me) and 1 not in world.job().runs and world.training.of(holder.me)
    holder.frozen = True


def committed_when_the_holder_is_back(world: World) -> None:
    """The holder's lease was dropped; it registers again between the coordinator's reading of the last vote and its commit."""
    me, holder = _leader(world), _holder(world, 1)
    world.store.revoke(holder.node.lease)
    holder.frozen = True
    job = _until(world, lambda job: job.open_migration and len(job.votes) >= 2)
    step = max(w.next_step for v in job.votes.values() for w in v.value.workers)
    stray = transactions.commit(job, Resume(step, {1: 0}, {1: 0}))
    me.frozen = True
    _comes_back(world, holder)
    me.frozen = False
    _arrives(world, me, stray)
    _go_on_without(world, holder)


def restarted_when_a_holder_is_back(world: World) -> None:
    """As before, at a restart of everybody."""
    me, holder = _leader(world), _holder(world, 1)
    world.store.revoke(holder.node.lease)
    job = world.job()
    stray = transactions.start(job, planner.first_seats(job), Kind.RESTART, "stray")
    me.frozen = holder.frozen = True
    _comes_back(world, holder)
    me.frozen = False
    _arrives(world, me, stray)
    _go_on_without(world, holder)


def _go_on_without(world: World, slow: Agent) -> None:
    for _ in range(15):
        world.round()
    slow.frozen = False


def claimed_and_given_away(world: World) -> None:
    """A node holds its slot's run key and has no process: between two restarts, and the second gives the slot to another host."""
    holder, other = _holder(world, 1), _holder(world, 0)
    world.kill_worker(other.host, 1)
    _until(world, lambda job: job.epoch == 2)
    while holder.node.group is not None:
        world.deliver(holder.host)
        world.step_agent(holder.host)
    holder.frozen = True
    assert world.drain(holder.host)
    _until(world, lambda job: any(w.generation == 2 for w in world.training.of(other.me)))
    world.kill_worker(other.host, 1)
    _until(world, lambda job: job.epoch == 3)
    holder.frozen = False
    _until(world, lambda job: 1 in job.runs and job.runs[1].value.incarnation != holder.me.incarnation)


def started_after_another_map(world: World) -> None:
    me, job = _leader(world), world.job()
    stray = transactions.start(job, planner.first_seats(job), Kind.RESTART, "stray")
    world.drain(_holder(world, 1).host)
    world.run()
    me = _leader(world)
    _arrives(world, me, stray)


def voted_twice(world: World) -> None:
    _, job = _open(world)
    holder = _holder(world, 0)
    assert job.migration is not None
    stray = transactions.vote(job, Vote(holder.host, holder.me.incarnation, job.migration.value.id, False, "stray"))
    now = transactions.vote(job, Vote(holder.host, holder.me.incarnation, job.migration.value.id, True, stop_step=99))
    assert holder.submit(now) or True
    _arrives(world, holder, stray)


def voted_on_what_is_decided(world: World) -> None:
    leader, job = _open(world)
    holder = _holder(world, 0)
    assert job.migration is not None
    stray = transactions.vote(job, Vote(holder.host, holder.me.incarnation, job.migration.value.id, False, "stray"))
    leader.frozen = False
    assert leader.submit(transactions.abort(world.job(), "cancelled"))
    _arrives(world, holder, stray)


def _claim(world: World, slot: int) -> tuple[Agent, Txn]:
    """The claim of a slot's holder, as it was when nobody held the run key."""
    holder, job = _holder(world, slot), world.job()
    held = job.runs[slot].value
    free = replace(job, runs={i: r for i, r in job.runs.items() if i != slot})
    return holder, transactions.claim(free, Run(slot, holder.host, holder.me.incarnation, held.epoch), holder.node.lease)


def _moved_and_free(world: World, slot: int) -> None:
    """The slot was drained and its leaver has let go; the joiner has not claimed it yet."""
    joiner = _standby(world)
    world.drain(_holder(world, slot).host)
    _until(world, lambda job: job.epoch == 2)
    assert _holder(world, slot) is joiner
    joiner.frozen = True
    _until(world, lambda job: slot not in job.runs)


def claimed_while_it_runs(world: World) -> None:
    holder, stray = _claim(world, 1)
    _arrives(world, holder, stray)


def claimed_after_it_was_given_up(world: World) -> None:
    """The slot's workers died: its holder released it and said why. Its first claim, long believed lost, must not block the joiner."""
    holder, stray = _claim(world, 1)
    world.kill_worker(holder.host)
    _until(world, lambda job: 1 in job.troubles)
    _arrives(world, holder, stray)


def claimed_under_an_older_map(world: World) -> None:
    holder, stray = _claim(world, 1)
    _moved_and_free(world, 1)
    _arrives(world, holder, stray)


def claimed_without_being_a_member(world: World) -> None:
    """It has lost its lease and has another one, under which it is not registered yet."""
    holder = _holder(world, 1)
    old = world.job()
    world.store.revoke(holder.node.lease)
    holder._acquire()
    free = replace(old, runs={0: old.runs[0]})
    run = Run(1, holder.host, holder.me.incarnation, 1)
    _arrives(world, holder, transactions.claim(free, run, holder.node.lease))


def switched_after_another_took_over(world: World) -> None:
    holder, job = _holder(world, 1), world.job()
    stray = transactions.update_run(job, replace(job.runs[1].value, pids=(4711,)), holder.node.lease)
    world.drain(holder.host)
    _until(world, lambda job: job.epoch == 2 and 1 in job.runs and job.runs[1].value.incarnation != holder.me.incarnation)
    _arrives(world, holder, stray)


def released_after_another_took_over(world: World) -> None:
    holder, job = _holder(world, 1), world.job()
    stray = transactions.release(job, 1)
    world.drain(holder.host)
    _until(world, lambda job: job.epoch == 2 and 1 in job.runs and job.runs[1].value.incarnation != holder.me.incarnation)
    _arrives(world, holder, stray)


def _trouble(world: World, slot: int) -> tuple[Agent, Txn]:
    holder, job = _holder(world, slot), world.job()
    trouble = Trouble(slot, holder.host, holder.me.incarnation, job.epoch, -1, 1, "stray", software=False)
    return holder, transactions.report_trouble(job, trouble)


def trouble_while_it_runs(world: World) -> None:
    holder, stray = _trouble(world, 1)
    _arrives(world, holder, stray)


def trouble_of_an_older_map(world: World) -> None:
    holder, stray = _trouble(world, 1)
    _moved_and_free(world, 1)
    _arrives(world, holder, stray)


def finished_when_the_leaver_is_back(world: World) -> None:
    """The coordinator has not heard of the leaver for a lease time; it registers again, and still hands over."""
    leader, holder = _leader(world), _holder(world, 1)
    request = world.drain(holder.host)
    _until(world, lambda job: job.epoch == 2)
    world.store.revoke(holder.node.lease)
    job = world.job()
    stray = transactions.finish_op(job, job.ops[request], OpState.DONE, "stray")
    _comes_back(world, holder)
    _arrives(world, leader, stray)


def trouble_without_being_a_member(world: World) -> None:
    holder, stray = _trouble(world, 1)
    world.store.revoke(holder.node.lease)
    _arrives(world, holder, stray)


def finished_after_it_was_cancelled(world: World) -> None:
    """The coordinator gives the request up; the operator was quicker."""
    leader, host = _leader(world), _holder(world, 1).host
    request = world.drain(host)
    job = world.job()
    stray = transactions.finish_op(job, job.ops[request], OpState.FAILED, "stray")
    assert world.undrain(host, cancel=request)
    world.audit.check()
    _arrives(world, leader, stray)


def cancelled_after_the_commit(world: World) -> None:
    """A cancelled request that is carried out all the same would be neither."""
    host = _holder(world, 1).host
    request = world.drain(host)
    job = world.job()
    stray = transactions.withdraw_drain(job, (host,), job.ops[request], "stray")
    _until(world, lambda job: job.epoch == 2 and job.ops[request].state is OpState.OPEN)
    world.audit.check()
    _arrives(world, world.agents[host], stray)


def registered_over_another_life(world: World) -> None:
    me = _standby(world)
    stray = transactions.register(replace(world.job(), members={}), me.member, me.node.lease)
    me.store.keep_alive(me.node.lease, SPEC.lease_ttl_s, lambda: None)
    _arrives(world, me, stray)


def updated_by_another_life(world: World) -> None:
    """The entry says what an older registration was: a host that is cordoned by its own fault would be a standby again."""
    me, job = _standby(world), world.job()
    world.store.revoke(me.node.lease)
    me._acquire()
    _arrives(world, me, transactions.update_member(job, replace(me.member, warm=True), me.node.lease))


def restarted(world: World) -> None:
    """Another life of a seated host is not the one that the map names."""
    host = _holder(world, 1).host
    world.kill_agent(host)
    world.bury(host)
    world.add_host(host)
    world.run()
    current = world.job().map
    require(current is not None and current.generation == 1, "7", "one lost host has cost the processes of all")


def back_before_the_commit(world: World) -> None:
    """A host is given up, comes back while its replacement votes, and claims its slot again."""
    holder = _holder(world, 1)
    holder.store.partitioned = True
    _until(world, lambda job: job.open_migration)
    holder.store.partitioned = False
    _until(world, lambda job: job.alive(holder.me))


def slow_after_a_new_lease(world: World) -> None:
    """The store drops an agent's lease; it takes another one, and is slow to register under it while others replace it."""
    slow = _holder(world, 1)
    world.store.revoke(slow.node.lease)
    world.deliver(slow.host)
    while slow.step() != "takes another lease":
        pass
    for _ in range(30):
        for name in sorted(world.agents):
            if name != slow.host:
                world.deliver(name)
                world.step_agent(name)
        for _ in range(3):
            for name in sorted(world.agents):
                if name != slow.host:
                    world.deliver(name)
                    world.step_agent(name)
            for worker in world.training.living():
                world.step_worker(worker)
        world.advance(1)


def cut_off_while_its_steps_go_on(world: World) -> None:
    """It does not fence itself while steps complete; the stayers' parking stops them, and the coordinator waits out the fence."""
    world.agents[_holder(world, 1).host].store.partitioned = True
    for _ in range(60):
        for _ in range(40):
            world.round()
        world.advance(1)
    assert world.job().epoch == 2


def cut_off_after_it_was_buried_by_mistake(world: World) -> None:
    """It has registered since, so nobody knows any more that it is dead: the fence has to be waited for."""
    world.bury(_holder(world, 1).host)
    world.run()
    world.agents[_holder(world, 1).host].store.partitioned = True
    _until(world, lambda job: job.epoch == 3)


def heard_of_half_a_commit(world: World) -> None:
    """A failed node takes its own slot again. It hears that its trouble is settled, and not yet of the map that settled it."""
    holder = _holder(world, 1)
    for name in world.agents.keys() - {holder.host}:
        world.cordon(name)
    world.kill_worker(holder.host)
    job = _until(world, lambda job: job.open_migration and holder.host in job.votes)
    assert job.open_migration is not None and [m.joiner for m in job.open_migration.moves] == [holder.me]
    holder.frozen = True
    _until(world, lambda job: job.epoch == 2)
    holder.frozen = False
    for watch in holder.store._watches:
        while watch._prefix == world.keys.slot(1) and watch.deliverable:
            watch.deliver()
    assert holder.job().epoch == 1 and not holder.job().troubles
    world.step_agent(holder.host)


CASES: dict[str, Case] = {
    f.__name__: f
    for f in (
        elected_twice, elected_over_a_leader, elected_without_being_a_member, proposed_twice, proposed_for_a_slot_that_is_claimed_again,
        proposed_drain_of_another_life, committed_after_its_abort, aborted_after_its_commit, started_after_another_map, voted_twice,
        voted_on_what_is_decided, claimed_while_it_runs, claimed_after_it_was_given_up, claimed_under_an_older_map,
        claimed_without_being_a_member, switched_after_another_took_over, released_after_another_took_over, trouble_while_it_runs,
        trouble_of_an_older_map, trouble_without_being_a_member, finished_after_it_was_cancelled, cancelled_after_the_commit,
        registered_over_another_life, updated_by_another_life, committed_after_its_leaver_died, restarted, back_before_the_commit,
        slow_after_a_new_lease, cut_off_while_its_steps_go_on, cut_off_after_it_was_buried_by_mistake,
        committed_after_the_slot_was_claimed_again, claimed_and_given_away,
        heard_of_half_a_commit, committed_when_the_holder_is_back, restarted_when_a_holder_is_back, lease_dropped_during_the_handover,
        finished_when_the_leaver_is_back,
    )
}  # fmt: skip


def deliver(case: str) -> None:
    """Raises Violation when the stray request does harm at once, AssertionError when the job does not train again."""
    world = _settled()
    CASES[case](world)
    world.heal()
    world.run()
