"""A node some of whose workers have ended: the rest end too, then its slot is released with what was seen.

May not know: workers that live, what follows from a trouble.
"""

from __future__ import annotations

from tmrun.core import policy, preemption, transactions
from tmrun.core.membership import Job
from tmrun.core.model import Cause, Done, Trouble
from tmrun.core.node import Effect, Forgotten, Group, Kill, Node, Note, Purpose, submit

KILLED = 137
"""128 + SIGKILL."""


def badly(node: Node, job: Job, group: Group) -> Effect | None:
    """Some failed, or were killed: the next effect."""
    if not group.gone:
        return None if group.killed else Kill("a worker of this node failed", gently=not group.joined)
    held = job.runs.get(group.slot)
    mine = held is not None and held.value.incarnation == node.me.incarnation
    if _unclaimed(node, job, group) and held is None:
        return _tell_trouble(node, job, group)
    if group.purpose is Purpose.STANDBY or not mine:
        # what it may owe (the store dropped its lease, and the run key with it) is paid next
        return Note(Forgotten(), "those workers are accounted for")
    assert job.map is not None
    if job.map.seats[group.slot] != node.me:
        return submit(transactions.release(job, group.slot), Forgotten())
    if group.generation < job.map.generation:
        return Note(Forgotten(), "stopped for the restart")
    trouble = _first_failure(node, job, group)
    return submit(transactions.release(job, group.slot, trouble), Forgotten(), say=f"{node.me.host} rank {trouble.rank}: {trouble.text}")


def _unclaimed(node: Node, job: Job, group: Group) -> bool:
    """Its slot is still ours by the map; the store dropped the claim on it, with the lease, and nobody has told yet that it is over."""
    current = job.map
    if current is None or group.purpose is Purpose.STANDBY or group.generation < current.generation:
        return False
    return current.seats[group.slot] == node.me and not job.trouble(group.slot) and group.slot not in job.done


def _tell_trouble(node: Node, job: Job, group: Group) -> Effect | None:
    if not job.alive(node.me):
        return None  # registers again first
    trouble = _first_failure(node, job, group)
    say = f"{node.me.host} rank {trouble.rank}: {trouble.text}"
    return submit(transactions.report_trouble(job, trouble), Forgotten(), say=say)


def _first_failure(node: Node, job: Job, group: Group) -> Trouble:
    assert job.spec is not None and job.map is not None
    ended = group.failed_first or [r for r, c in group.exits.items() if c] or [0]
    local = next((r for r in ended if r not in group.echoes), ended[0])
    code = group.exits.get(local) or 1
    text = group.errors.get(local) or (f"killed by signal {code - 128}" if code > 128 else f"exit code {code}")
    rank = job.spec.ranks(group.slot)[local]
    away = preemption.taken_away(job, node.me.host) or (group.killed if group.killed.startswith(preemption.GOES_AWAY) else "")
    if away:  # whatever the workers made of it
        return _trouble_of(node, job, group, rank, KILLED, away, Cause.LOST, echo=False)
    hung = job.evicted(node.me)
    if hung is not None and group.killed == hung.text:
        return _trouble_of(node, job, group, hung.rank, code, hung.text, Cause.HANG, echo=False)
    cause = policy.cause_of(code, out_of_memory=group.out_of_memory, ours=bool(group.joined or group.warm))
    return _trouble_of(node, job, group, rank, code, text, cause, echo=local in group.echoes)


def _trouble_of(node: Node, job: Job, group: Group, rank: int, code: int, text: str, cause: Cause, *, echo: bool) -> Trouble:
    crashed = cause is Cause.CRASH and not group.joined  # what can only be restarted is restarted as often as it was allowed to
    software = cause is Cause.PROGRAM or crashed
    return Trouble(
        group.slot, node.me.host, node.me.incarnation, job.epoch, rank, code, text, software, software and echo, cause, group.step
    )


def well(node: Node, job: Job, group: Group) -> Effect:
    """All ended with 0: the next effect."""
    held = job.runs.get(group.slot)
    if held is None or held.value.incarnation != node.me.incarnation or group.purpose is Purpose.STANDBY:
        return Note(Forgotten(), "those workers are accounted for")
    if group.left or (job.map is not None and job.map.seats[group.slot] != node.me):
        return submit(transactions.release(job, group.slot), Forgotten())  # a leaver; its word may come after its end
    if preemption.shut_down(job, node.me.host) and not group.joined:  # it has saved what it had, and is not done
        return submit(transactions.release(job, group.slot, _first_failure(node, job, group)), Forgotten())
    return submit(transactions.release(job, group.slot, Done(group.slot, group.epoch)), Forgotten())
