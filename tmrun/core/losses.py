"""Which slots have failed, how sure that is, who must rest, and the breaker: too many at once accuse the store or the network.

May not know: what is done about it.
"""

from __future__ import annotations

import math

from tmrun.core import policy
from tmrun.core.decision import Timers
from tmrun.core.membership import Job
from tmrun.core.model import Host, Move, Pause, Spec

BREAKER_SHARE = 0.1
"""Of the nodes: a loss of so many at once is not believed at once."""


def failed(job: Job) -> list[int]:
    """Slots whose workers or node are gone, unless they had finished."""
    assert job.map is not None
    return sorted({*job.gone, *filter(job.trouble, job.troubles)} - job.done.keys())


def what(job: Job, slot: int) -> str:
    """What happened to it, for people."""
    assert job.map is not None
    seat = job.map.seats[slot]
    trouble = job.trouble(slot)
    if trouble is None:
        return f"{seat.host} is gone (slot {slot})"
    rank = f" rank {trouble.rank}" if trouble.rank >= 0 else ""
    return f"{seat.host}{rank}: {trouble.text}"


def confirmed(job: Job, slot: int) -> bool:
    """Dead beyond doubt: reported by its own agent, by whoever saw the agent exit, or by a newer life of the same host."""
    assert job.map is not None
    seat = job.map.seats[slot]
    note = job.obituaries.get(seat.host)
    return job.trouble(slot) is not None or seat.host in job.members or (note is not None and note.incarnation == seat.incarnation)


def taking_over(job: Job) -> list[Move]:
    """Joiners that have not failed and have no state yet: they can only refuse to be stayers, which would cost a restart."""
    assert job.map is not None
    lost = {*failed(job), *job.done}
    moved = [(m, job.runs.get(m.slot)) for m in job.map.moves if m.slot not in lost]
    return [m for m, run in moved if run is None or not run.value.joined or run.value.incarnation != m.joiner.incarnation]


def echoes(job: Job, slot: int) -> bool:
    """Its workers ended because they lost a peer: whatever else failed is the cause."""
    trouble = job.trouble(slot)
    return trouble is not None and trouble.echo


def blamed(job: Job) -> Host | None:
    """Whose failure is the newest, if anybody's is known: one that nothing has been done about yet, else the one behind the newest map."""
    told = list(job.troubles.values())
    now = [t for t in told if job.trouble(t.slot)]
    if not now and job.map is not None and job.map.incidents:
        return job.map.incidents[0].host
    return min(now or told, key=lambda t: (-t.epoch, t.echo)).host if told else None


def exit_code(job: Job, failed: list[int]) -> int:
    """Of the first whose workers told one; 1: none did."""
    return next((job.troubles[i].exit_code for i in failed if job.trouble(i)), 1)


def accuses(job: Job, slot: int) -> bool:
    """Whether its failure speaks against its machine, or its rank: it is no error of the program, and not only lost others."""
    trouble = job.trouble(slot)
    return trouble is None or not (trouble.software or trouble.exit_code == policy.EXIT_LOST)


def resting(job: Job, timers: Timers, now: float) -> set[Host]:
    """Lemons that have not cooled down."""
    lemons = {h: seconds for h, seconds in policy.lemons(job.maps).items() if h in job.members}
    return {h for h, seconds in lemons.items() if seconds > timers.since(f"rests {h} {policy.strikes(job.maps, h)}", now)}


def vanished(job: Job) -> list[int]:
    """Slots whose lease is gone and whose death nobody confirms."""
    return [i for i in job.gone if i not in job.done and not confirmed(job, i)]


def breaker_limit(spec: Spec) -> int:
    """So many nodes that vanish within one lease time, all without a word, accuse the store or the network instead."""
    return max(3, math.ceil(spec.nnodes * BREAKER_SHARE))


def mass_loss(job: Job, timers: Timers, now: float) -> bool:
    """The breaker has tripped, or trips now. Its timer runs from the trip and is not begun anew by losses that follow it closely, so
    that it only ever costs one lease time."""
    assert job.spec is not None and job.map is not None
    ttl, slots = job.spec.lease_ttl_s, vanished(job)
    if slots and "suspect" in timers.seen and timers.since("suspect", now) < ttl:
        return True
    fresh = [i for i in slots if timers.since(f"gone {i} {job.map.seats[i].incarnation}", now) < ttl]
    return len(fresh) >= breaker_limit(job.spec)


def breaker(job: Job, timers: Timers, now: float) -> str:
    """Why nobody is replaced now; empty: go on."""
    assert job.spec is not None
    left, slots = job.spec.lease_ttl_s - timers.since("suspect", now), vanished(job)
    if "suspect" not in timers.seen or left <= 0 or not slots:
        return ""
    lost = f"{len(slots)} of {job.spec.nnodes} nodes vanished at once"
    return f"{lost}: suspecting the store or the network, replacing nobody for {left:.0f} s"


def held_back(job: Job) -> str:
    """What a pause means, for people; empty when there is none."""
    return f"{paused(job.pause)}; `tmrun resume` lets it go on" if job.pause is not None else ""


def paused(pause: Pause) -> str:
    """That there is one, and why."""
    return f"automatic replacement is paused{f' ({pause.reason})' if pause.reason else ''}"
