"""A hang, as the coordinator sees it: what the agents report of their workers, who is to blame, what is ordered.

Every agent reports how its workers look once one of them makes no progress (``Stall``); the victims do so as much as the culprit. Only
together do the reports name somebody. May not know: how a worker was watched, transactions, clocks.
"""

from __future__ import annotations

from tmrun.core import watchdog
from tmrun.core.membership import Job
from tmrun.core.model import Eviction, Evidence, Kind, Seat, Sign
from tmrun.core.watchdog import Blame, Finding, Place


def finding(job: Job) -> Finding | None:
    """What the reports of the newest epoch say together; None: there are none, but of loops that are over."""
    signs = _signs(job)
    if job.spec is None or not any(s.evidence.stuck for s in signs):
        return None
    return watchdog.culprits(signs, job.spec.world)


def left(job: Job) -> tuple[int, ...]:
    """Ranks whose loop is over while their process lives on."""
    return tuple(s.rank for s in _signs(job) if s.evidence is Evidence.LEFT)


def unstopped(job: Job, waited_s: float) -> Finding | None:
    """Who keeps a failure's open migration waiting, ``waited_s`` after it began: those who stay have to stop before they can vote.

    What was reported before may be what the migration heals, so nobody is late earlier than it takes to be told of.
    """
    current, signs = job.open_migration, _signs(job)
    if current is None or current.kind is not Kind.FAILURE or job.spec is None or job.map is None:
        return None
    limit = watchdog.limits(job.spec.hang_timeout)
    if limit is None or waited_s < limit.late_s:
        return None
    stays = [i for i in range(len(job.map.seats)) if i not in current.slots]
    parked = {r for i in stays if job.map.seats[i].host in job.votes for r in job.spec.ranks(i)}
    return watchdog.keep_parked_waiting(signs, parked, {r for i in stays for r in job.spec.ranks(i)})


def _signs(job: Job) -> list[Sign]:
    """Of the ranks that sit in the newest map, by rank."""
    found: list[Sign] = []
    for seat in job.map.seats if job.map and job.stalls else ():
        stall = job.stalls.get(seat.host)
        if stall is not None and (stall.incarnation, stall.epoch) == (seat.incarnation, job.epoch):
            found += stall.signs
    return sorted(found, key=lambda s: s.rank)


def same_place(job: Job, found: Finding) -> bool:
    """All ranks wait at the step to which the newest map had already brought them back without moving anybody."""
    current = job.map
    assert current is not None
    together = current.kind is Kind.FAILURE and not current.moves
    return together and found.blame is Blame.NOBODY and max(s.step for s in _signs(job)) <= current.resume.target


def orders(job: Job, found: Finding) -> tuple[Eviction, ...]:
    """To the nodes of the ranks that are to blame, each once an epoch."""
    assert job.spec is not None and job.map is not None
    first: dict[int, int] = {}
    for rank in found.ranks if found.blame is Blame.RANKS else ():
        first.setdefault(rank // job.spec.nproc, rank)
    seats = {slot: job.map.seats[slot] for slot in first}
    act = job.spec.hang_action == "replace" and _long_enough(job, found)
    return tuple(
        Eviction(seat.host, seat.incarnation, job.epoch, first[slot], _of(found, first[slot]), act)
        for slot, seat in seats.items()
        if job.alive(seat) and not _ordered(job, seat, act=act)
    )


def _ordered(job: Job, seat: Seat, *, act: bool) -> bool:
    order = job.evicted(seat)
    return order is not None and (order.act or not act)


def _long_enough(job: Job, found: Finding) -> bool:
    """Who is frozen is ended at once, who is only late gets more time than it takes to be told of."""
    limit = watchdog.limits(job.spec.hang_timeout) if job.spec else None
    late = [s.since_s for s in _signs(job) if s.rank in found.ranks and s.evidence is Evidence.LATE]
    return limit is not None and (found.at_once or min(late, default=float("inf")) >= limit.late_s * limit.act)


def waits_in_vote(job: Job) -> bool:
    """All ranks are where they certainly wait, and do not compute."""
    return all(s.place == Place.VOTE.name for s in _signs(job))


def _of(found: Finding, rank: int) -> str:
    """Why, without the rank's name, which is shown before it anyway."""
    return found.why.removeprefix(f"rank {rank} ")
