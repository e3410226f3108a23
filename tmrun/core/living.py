"""A node whose workers all live: a migration is carried between the store and them, else the store is told how they are.

May not know: how workers start, what follows from their end.
"""

from __future__ import annotations

from dataclasses import replace

from tmrun.core import admission, preemption, transactions
from tmrun.core import migration as judging
from tmrun.core.membership import Job
from tmrun.core.model import Doubt, Host, Incarnation, Kind, Machine, Migration, Phase, RankMap, Run, Seat, Vote
from tmrun.core.node import Abort, Commit, Effect, Group, Kill, Node, Prepare, Purpose, submit


def reconcile(node: Node, job: Job, group: Group, current: RankMap) -> Effect | None:
    """The next effect."""
    return _migration(node, job, group) or (_active if group.purpose is Purpose.ACTIVE else _standby)(node, job, group, current)


def _migration(node: Node, job: Job, group: Group) -> Effect | None:
    """Carry an open or just decided migration between the store and the workers: a commit before anything newer."""
    stored = job.migration
    if stored is None or job.map is None:
        return None
    current = stored.value
    if job.comm is not None and group.migration and group.migration == job.map.migration and group.commit_sent != job.map.epoch:
        return _switch(node, job, group, job.map)
    if job.open_migration is not None:
        return _prepare(node, job, group, current)
    if group.migration == current.id and current.phase is Phase.ABORTED and group.abort_sent != current.id:
        return Abort(current.id, current.reason)
    return None


def _prepare(node: Node, job: Job, group: Group, current: Migration) -> Effect | None:
    role = judging.required(job, current).get(node.me)
    if role is None or (role == "joiner") != (group.purpose is Purpose.STANDBY):
        return None
    if node.me.host in job.votes or not job.alive(node.me):
        return None  # also when those who were prepared have died since: what replaced them was not part of the vote
    if group.migration != current.id:
        return Prepare(current, _slot_in(current, node.me, group), f"migration {current.id} ({current.kind.value}): {current.reason}")
    refused = next((a for a in group.answers.values() if a.refused), None)
    if refused:
        return submit(transactions.vote(job, Vote(node.me.host, node.me.incarnation, current.id, False, refused.refused, refused.again)))
    if len(group.answers) < len(group.pids) or (current.kind is Kind.DRAIN and group.doubt):
        return None  # a doubt is told in place of a vote: workers that wait for an explanation never get to the stop step
    return submit(transactions.vote(job, _yes(node, group, current.id)))


def _slot_in(current: Migration, me: Seat, group: Group) -> int:
    return next((m.slot for m in current.moves if m.joiner == me), group.slot)


def _yes(node: Node, group: Group, migration: int) -> Vote:
    answers = list(group.answers.values())
    stops = {a.stop_step for a in answers if a.stop_step is not None}
    host, life = Host(node.me.host), Incarnation(node.me.incarnation)
    if len(stops) > 1:
        return Vote(host, life, migration, False, f"its workers name different stop steps: {sorted(stops)}")
    groups = tuple(sorted({name for a in answers for name in a.groups}))
    workers = tuple(a.vote for a in answers if a.vote)
    return Vote(host, life, migration, True, stop_step=stops.pop() if stops else None, workers=workers, groups=groups)


def _switch(node: Node, job: Job, group: Group, current: RankMap) -> Effect | None:
    assert job.comm is not None
    slot = current.slot_of(node.me)
    joins = group.purpose is Purpose.STANDBY
    if joins and slot is not None and current.kind is Kind.FAILURE:
        claimed = _claim(node, job, group, current, slot)
        if claimed is not None:
            return claimed
        if slot not in job.runs or job.runs[slot].value.incarnation != node.me.incarnation:
            return None
    return Commit(current, -1 if slot is None else slot, job.comm.ids, f"epoch {current.epoch} is committed")


def _claim(node: Node, job: Job, group: Group, current: RankMap, slot: int) -> Effect | None:
    """Hold the slot's run key with what it should say, as soon as nobody else holds it."""
    joined = len(group.joined) == len(group.pids)
    run = Run(slot, node.me.host, node.me.incarnation, current.epoch, group.pids, joined, _machine(group))
    held = job.runs.get(slot)
    if held is None:
        return submit(transactions.claim(job, run, node.lease)) if job.alive(node.me) else None
    if held.value.incarnation == node.me.incarnation and held.value != run:
        return submit(transactions.update_run(job, run, node.lease))
    return None


def _active(node: Node, job: Job, group: Group, current: RankMap) -> Effect | None:
    if current.seats[group.slot] == node.me:
        order = job.replacement(node.me.host)
        if order is not None:
            return Kill(preemption.given_up(order), gently=order.gently)
        return _claim(node, job, group, current, group.slot) or _cool(node, job) or _stall(node, job, group) or _doubt(node, job, group)
    if group.commit_sent == current.epoch and not job.told_failed(group.slot):
        return _stuck(job, group, current)  # it hands its state over
    return Kill(f"slot {group.slot} belongs to {current.seats[group.slot].host} now")


def _stuck(job: Job, group: Group, current: RankMap) -> Effect | None:
    """Somebody was lost after a drain's commit, or connections: leavers that are not at the stop step yet cannot get there, and must not
    wait for it."""
    lost = job.told.epoch == job.epoch and bool(job.told.failed)
    broken = job.open_migration is not None and job.open_migration.kind is Kind.FAILURE
    if not (lost or broken) or group.abort_sent == current.migration:
        return None
    return Abort(current.migration, "a rank was lost before its stop step, perhaps")


def _cool(node: Node, job: Job) -> Effect | None:
    """A member that holds a slot is no warm standby."""
    member = job.members.get(node.me.host)
    if member is None or member.value.incarnation != node.me.incarnation or not member.value.warm:
        return None
    return submit(transactions.update_member(job, replace(member.value, warm=False), node.lease))


def _stall(node: Node, job: Job, group: Group) -> Effect | None:
    """Say how our workers look while they make no progress, and that they do again."""
    told = job.stalls.get(node.me.host)
    known = told.signs if told is not None and (told.incarnation, told.epoch) == (node.me.incarnation, job.epoch) else ()
    if known == group.signs or not job.alive(node.me):
        return None
    return submit(transactions.report_stall(job, node.me, group.signs, node.lease))


def _doubt(node: Node, job: Job, group: Group) -> Effect | None:
    """Say once an epoch that our workers wait for an explanation, and who of them waits no more."""
    assert job.spec is not None
    told, ranks = job.doubts.get(node.me.host), job.spec.ranks(group.slot)
    ended = tuple(sorted(ranks[local] for local in group.exits))
    if not group.doubt or not job.alive(node.me) or (told is not None and (told.epoch, told.ended) == (job.epoch, ended)):
        return None
    doubt = Doubt(Host(node.me.host), Incarnation(node.me.incarnation), job.epoch, group.doubt, ended)
    return submit(transactions.report_doubt(job, doubt, node.lease))


def _standby(node: Node, job: Job, group: Group, current: RankMap) -> Effect | None:
    if job.draining(node.me.host):
        return Kill("this node is drained")
    member = job.members.get(node.me.host)
    if member is None or member.value.incarnation != node.me.incarnation:
        return None
    warm = len(group.warm) == len(group.pids) and not group.exits
    told = replace(member.value, warm=warm, machine=_machine(group), rehearsal=group.rehearsal)
    if told == member.value or not (warm or member.value.warm):
        return None
    say = f"{node.me.host} is a warm standby" if warm and not member.value.warm else ""
    return submit(transactions.update_member(job, told, node.lease), say=say)


def _machine(group: Group) -> Machine | None:
    """Of the weakest worker, once all have said."""
    return admission.weakest(list(group.machines.values())) if len(group.machines) == len(group.pids) else None
