"""A node without workers: those of its slot are started, or a standby's; what it owes to the store is paid first.

May not know: workers that live or have ended.
"""

from __future__ import annotations

from dataclasses import replace

from tmrun.core import transactions
from tmrun.core.membership import Job, natural
from tmrun.core.model import RankMap, Run, Spec, Trouble
from tmrun.core.node import Effect, Node, Purpose, Spawn, submit

MAX_STANDBY_FAILURES = 3
"""Rehearsals that may fail in a row before the node is no standby any more, until it has rested or all workers start anew."""
MAX_RECORDED = 8
"""Slots whose ranks keep a record of their own for rehearsals; all others share one a role."""


def reconcile(node: Node, job: Job, current: RankMap) -> Effect | None:
    """The next effect."""
    if transactions.owes_word(job, node.me):
        return submit(transactions.confirm_left(job, node.me))
    stray = _stray_claim(node, job, current)
    if stray is not None:
        return submit(transactions.release(job, stray))
    slot = current.slot_of(node.me)
    if slot is not None and not job.trouble(slot) and slot not in job.done:
        return _start(node, job, current, slot)
    if slot is not None and slot in job.done:
        return None
    return _idle_standby(node, job, current)


def _stray_claim(node: Node, job: Job, current: RankMap) -> int | None:
    """A slot that was claimed, and given to somebody else before a process was started for it."""
    mine = (i for i, run in job.runs.items() if run.value.incarnation == node.me.incarnation)
    return next((i for i in mine if current.seats[i] != node.me), None)


def _start(node: Node, job: Job, current: RankMap, slot: int) -> Effect | None:
    if not job.alive(node.me):
        return None
    held = job.runs.get(slot)
    if held is not None and held.value.incarnation != node.me.incarnation:
        return None
    if node.started_generation >= current.generation or current.epoch != current.generation:
        trouble = _trouble(node, current, slot, "died before it took its ranks over")
        if node.start_error:
            assert job.spec is not None
            trouble = replace(trouble, rank=job.spec.ranks(slot)[0], text=node.start_error)
        return submit(transactions.release(job, slot, trouble) if held else transactions.report_trouble(job, trouble))
    run = Run(slot, node.me.host, node.me.incarnation, current.epoch)
    if held is None:
        return submit(transactions.claim(job, run, node.lease))
    if held.value != run:
        return submit(transactions.update_run(job, run, node.lease))
    return Spawn(Purpose.ACTIVE, slot, current.epoch, current.generation, f"epoch {current.epoch} gives me slot {slot}")


def _trouble(node: Node, current: RankMap, slot: int, text: str) -> Trouble:
    return Trouble(slot, node.me.host, node.me.incarnation, current.epoch, -1, 1, text, software=False)


def _idle_standby(node: Node, job: Job, current: RankMap) -> Effect | None:
    member = job.members.get(node.me.host)
    if member is None or member.value.incarnation != node.me.incarnation:
        return None
    given_up = gave_up(node) and node.failed_generation == current.generation
    if member.value.fault and not given_up:
        return submit(transactions.update_member(job, replace(member.value, fault=""), node.lease))
    if given_up and not member.value.fault:
        fault = f"its rehearsal failed {node.standby_failures} times: {node.standby_error or 'see its log'}"
        return submit(
            transactions.update_member(job, replace(member.value, warm=False, fault=fault), node.lease), say=f"{node.me.host}: {fault}"
        )
    if member.value.warm:
        return submit(transactions.update_member(job, replace(member.value, warm=False), node.lease))
    if job.draining(node.me.host) or member.value.fault or not job.told.movable or job.told.ending:
        return None
    return Spawn(Purpose.STANDBY, _likely_slot(node, job, current), 0, current.generation, "standby: rehearse")


def gave_up(node: Node) -> bool:
    """Whether this node does not rehearse any more."""
    return node.standby_failures >= MAX_STANDBY_FAILURES


def _likely_slot(node: Node, job: Job, current: RankMap) -> int:
    """The slot to rehearse: one that is failing or draining now, else one of those that standbys share among them.

    A node knows of no other standby, so the number in its name spreads them.
    """
    wanted = [i for i, s in enumerate(current.seats) if job.told_failed(i) or job.draining(s.host)]
    if wanted:
        return wanted[0]
    assert job.spec is not None
    shared = rehearsed_first(job.spec) or range(len(current.seats) - 1, len(current.seats))
    number = next((part for kind, part in reversed(natural(node.me.host)) if kind == 0), 0)
    return shared[-1 - int(number) % len(shared)]


def rehearsed_first(spec: Spec) -> range:
    """Slots whose ranks standbys rehearse when the job begins."""
    return range(spec.nnodes - min(spec.standby, spec.nnodes, MAX_RECORDED), spec.nnodes)
