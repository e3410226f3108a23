"""What a node does next: compares what is wanted (the snapshot) with what is there (the node), returns one effect.

The shell executes it, feeds the facts back and asks again. Level-triggered: safe at any time, any number of times.

    no workers       -> start those of its slot, or a standby's (``idle``)
    some have ended  -> the rest too, then say what was seen (``ended``)
    all live         -> carry a migration between store and workers, else say how they are (``living``)

May not know: processes, sockets, stores, clocks.
"""

from __future__ import annotations

from tmrun.core import ended, idle, living
from tmrun.core.membership import Job
from tmrun.core.model import End, Evidence, JobState, RankMap
from tmrun.core.node import SIGTERM, Effect, Group, Kill, Node, Purpose, Quit


def concerns(node: Node, job: Job) -> frozenset[int]:
    """The slots of which this node must know who runs them: the one it holds, those that its workers still run, those it is to take, and
    those that it claimed."""
    slots = set() if job.map is None else {i for i, s in enumerate(job.map.seats) if s == node.me}
    slots |= {i for i, run in job.runs.items() if run.value.incarnation == node.me.incarnation}
    if node.group is not None and node.group.purpose is Purpose.ACTIVE:
        slots.add(node.group.slot)
    if job.open_migration is not None:
        slots |= {m.slot for m in job.open_migration.moves if m.joiner == node.me}
    return frozenset(slots)


def reconcile(node: Node, job: Job) -> Effect | None:
    """The next effect, or None when all is as wanted."""
    group = node.group
    if job.end is not None:
        return _wind_down(node, job)
    if job.spec is None or job.map is None:
        return None
    if group is None:
        return idle.reconcile(node, job, job.map)
    if group.failed or group.killed:
        return ended.badly(node, job, group)
    if group.gone:
        return ended.well(node, job, group)
    frozen = _frozen(node, job, group)
    if frozen:
        return Kill(frozen)
    if group.purpose is Purpose.ACTIVE and group.generation < job.map.generation:
        return Kill(f"restart as generation {job.map.generation}", gently=not group.joined)
    if group.purpose is Purpose.STANDBY and group.generation < job.map.generation and job.map.slot_of(node.me) is None:
        return Kill(f"the job began anew as generation {job.map.generation}, perhaps from a checkpoint: rehearse again")
    if group.purpose is Purpose.STANDBY and _seated_unprepared(node, job, group, job.map):
        return Kill(f"epoch {job.map.epoch} gives this node ranks that these workers are not prepared for")
    return living.reconcile(node, job, group, job.map)


def unsure(node: Node, job: Job, effect: Effect) -> bool:
    """Whether it cannot be undone and rests on what the store says. ``job`` may be of several revisions (a trouble that is settled already,
    the map that settled it not heard of yet), so it is to be decided again on a snapshot of one. That the job ended stays true."""
    return isinstance(effect, Kill) and job.end is None and node.group is not None and not node.group.failed


def _frozen(node: Node, job: Job, group: Group) -> str:
    """Why the workers must end now although they live: the coordinator says that they keep the job waiting, or they are frozen and hold
    no rank that it would judge."""
    assert job.map is not None
    order = job.evicted(node.me)
    if order is not None and not order.act:
        order = None
    if group.purpose is Purpose.ACTIVE and job.map.seats[group.slot] == node.me:
        return order.text if order is not None and group.epoch == order.epoch else ""
    dead = [s for s in group.signs if s.evidence in (Evidence.STOPPED, Evidence.MUTE)]
    return f"worker {dead[0].rank} is {dead[0].evidence.value}" if dead else ""


def _seated_unprepared(node: Node, job: Job, group: Group, current: RankMap) -> bool:
    """A standby can become active only by the migration that it prepared; a start map wants new processes."""
    slot = current.slot_of(node.me)
    if slot is None or job.trouble(slot) is not None:
        return False
    return current.epoch == current.generation or group.migration != current.migration


def _wind_down(node: Node, job: Job) -> Effect | None:
    assert job.end is not None
    if node.group is not None and not node.group.gone:
        gently = node.group.purpose is Purpose.ACTIVE  # the script's own handlers are not for a rehearsal
        return None if node.group.killed else Kill(f"job {job.end.state.value}", gently=gently, signal=_stop_signal(job.end))
    return Quit(job.end.exit_code, f"job {job.end.state.value}: {job.end.reason}")


def _stop_signal(end: End) -> int:
    """What stopped the job is passed on to its workers, as by torchrun."""
    number = end.exit_code - 128
    return number if end.state is JobState.STOPPED and 0 < number < 32 else SIGTERM
