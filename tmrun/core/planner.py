"""Who takes which slot: standby sizing, the first placement, joiners for leavers, sources of state, the step to go on from.

Pure arithmetic on snapshots; answers come with their reason. May not know: transactions, time, torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tmrun.core import placement, policy
from tmrun.core.admission import Fit
from tmrun.core.errors import UsageError
from tmrun.core.membership import Job, fitness, natural
from tmrun.core.model import Host, Member, Move, Resume, Seat, Vote, WorkerVote


def standby_count(text: str, nnodes: int) -> int:
    """``3`` -> 3 nodes; ``6%`` -> 6 % of nnodes rounded up, at least 1; ``0`` -> none. Raises UsageError."""
    number = text.removesuffix("%")
    try:
        value = float(number) if text.endswith("%") else int(number)
    except ValueError:
        value = -1
    if value < 0 or math.isnan(value) or math.isinf(value):
        raise UsageError(f"--standby {text!r}: expected a number of nodes (2) or a share of the nodes (6%)")
    if not text.endswith("%"):
        return int(value)
    return 0 if value == 0 else max(1, math.ceil(nnodes * value / 100))


def restart_seats(job: Job, resting: Collection[Host] = ()) -> tuple[Seat, ...]:
    """``first_seats`` without lemons that have not cooled down, unless there are too few others, or they run their slot well just now."""
    assert job.spec is not None
    idle = set(resting) - _seated(job, resting)
    without = first_seats(replace(job, members={h: m for h, m in job.members.items() if h not in idle})) if idle else ()
    return without if len(without) == job.spec.nnodes else first_seats(job)


def first_seats(job: Job) -> tuple[Seat, ...]:
    """Seats of the first map, or of a restart: whoever holds a slot and lives keeps it, then hosts get the slot that they asked for
    (``--node-rank``), the rest go to free hosts in natural order, by place first; the hosts that stay spare are spread over the failure
    domains. A host whose rehearsals fail may well run what starts anew: it is taken when there are too few others.

    Shorter than nnodes when there are too few hosts.
    """
    assert job.spec is not None
    kept: list[Seat | None] = [None] * job.spec.nnodes
    if job.map:
        kept = [job.members[s.host].value.seat if s.host in job.members and not job.draining(s.host) else None for s in job.map.seats]
    taken = {s.host for s in kept if s}
    able = [m for m in _uncordoned(job, lambda m: not m.fault) if m.host not in taken]
    able += [m for m in _uncordoned(job, _rehearses_in_vain) if m.host not in taken][: max(0, kept.count(None) - len(able))]
    asked = {m.node_rank: m for m in reversed(able)}
    for slot, seat in enumerate(kept):
        if seat is None and slot in asked:
            kept[slot] = asked[slot].seat
            able.remove(asked[slot])
    free = _in_order(able, kept.count(None))
    for slot, seat in enumerate(kept):
        if seat is None and free:
            kept[slot] = free.pop(0)
    return tuple(s for s in kept if s)


def _in_order(free: list[Member], wanted: int) -> list[Seat]:
    places = {m.host: placement.place_of(m.labels) for m in sorted(free, key=lambda m: placement.place_of(m.labels))}
    spare = set(placement.spares(places, max(0, len(free) - wanted)))  # type: ignore[arg-type]  # a Host is a str
    seats = {m.host: m.seat for m in free}
    return [seats[host] for host in places if host not in spare]


def _uncordoned(job: Job, wanted: Callable[[Member], bool]) -> list[Member]:
    found = [m.value for m in job.members.values() if wanted(m.value)]
    return sorted((m for m in found if not job.cordoned(m.host)), key=lambda m: natural(m.host))


def _rehearses_in_vain(member: Member) -> bool:
    return bool(member.fault)


def standbys(job: Job, *, warm_only: bool = True) -> list[Member]:
    """Members that may take a slot now: warm, fit, not cordoned, running none. A new life of a host that died in its slot is free."""
    able = _without_ranks(job, _uncordoned(job, lambda m: not m.fault and (m.warm or not warm_only)))
    return [m for m in able if fitness(job, m).fit is not Fit.REFUSED]


def unable(job: Job) -> list[Member]:
    """Members without ranks whose rehearsals fail: no standbys, but all workers could start anew on them."""
    return _without_ranks(job, _uncordoned(job, _rehearses_in_vain))


def _without_ranks(job: Job, members: list[Member]) -> list[Member]:
    if not members:
        return []
    busy = _seated(job, {m.host for m in members}) | {r.value.host for r in job.runs.values()}
    return [m for m in members if m.host not in busy]


def _seated(job: Job, hosts: Collection[Host]) -> set[Host]:
    """Those of ``hosts`` that hold a slot, and whose workers have not failed."""
    seats = enumerate(job.map.seats if job.map else ())
    return {s.host for i, s in seats if s.host in hosts and job.alive(s) and job.trouble(i) is None}


MAX_MOVES = 24
"""Slots that one migration can move: each needs up to three of a transaction's 128 guards."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves that can be made now; ``short``: slots without a joiner; ``why`` for people."""

    moves: tuple[Move, ...]
    short: tuple[int, ...]
    why: str


def plan_moves(job: Job, slots: Sequence[int], to: str = "", resting: Collection[Host] = ()) -> Plan:
    """Give each leaving slot a warm joiner: rather not a machine whose workers just failed, none in a domain that was lost, none that is
    worse than the job's, one that failed seldom, one that has rehearsed the slot, one near the leaver. ``to``: this one, whatever speaks
    against it. ``resting``: lemons that have not cooled down yet."""
    assert job.map is not None
    able = standbys(job)
    free = {m.host: m for m in able if (m.host == to if to else m.host not in resting)}
    standing = _standing(job, free.values(), slots) if free else {}
    moves: list[Move] = []
    short: list[int] = []
    for slot in slots[:MAX_MOVES]:
        if free:
            best = min(free.values(), key=lambda m: (*standing[m.host], *_suits(job, m, slot, slots)))
            moves.append(Move(slot, job.map.seats[slot], free.pop(best.host).seat))
        else:
            short.append(slot)
    text = ", ".join(f"slot {m.slot} {m.leaver.host} -> {m.joiner.host}" for m in moves)
    tired = [m.host for m in able if m.host in resting and m.host != to]
    lacking = f"no warm standby for slot {', '.join(map(str, short))}" if short else ""
    if short and tired:
        lacking += f" ({', '.join(tired)} failed {policy.LEMON} times in a row and cools down)"
    return Plan(tuple(moves), tuple(short), "; ".join(x for x in (text, lacking) if x))


def _standing(job: Job, members: Collection[Member], slots: Sequence[int]) -> dict[Host, tuple[bool, bool, Fit, int]]:
    """What counts against each of them, whichever slot it takes: failed itself, is where all failed, is no match, failed often."""
    assert job.map is not None
    seated, lost = {s.host for s in job.map.seats}, placement.lost(job.map.places, slots)
    return {
        m.host: (
            m.host in seated,
            placement.inside(placement.place_of(m.labels), lost),
            fitness(job, m).fit,
            policy.strikes(job.maps, m.host),
        )
        for m in members
    }


def _suits(job: Job, member: Member, slot: int, slots: Sequence[int]) -> tuple[int, int]:
    """How well it suits the slot, lowest first; what another leaving slot's role was rehearsed for is left to that one."""
    assert job.map is not None and job.spec is not None
    leaver = job.map.places[slot] if slot < len(job.map.places) else ""
    rehearsed = member.rehearsal.rank // job.spec.nproc if member.rehearsal else -1
    other = 0 if rehearsed == slot else 2 if rehearsed in slots else 1
    return other, placement.distance(placement.place_of(member.labels), leaver)


def next_step(workers: Sequence[WorkerVote]) -> int:
    """The step everyone runs next after a failure: somebody passed the vote of k -> k + 1 for all, else k for all."""
    return max(w.next_step for w in workers)


def sources(moved: Sequence[int], workers: Sequence[WorkerVote], target: int) -> dict[int, int] | None:
    """Moved rank -> live replica that sends its state; prefers ranks already at ``target``, spreads the load. None: a shard is lost."""
    load = {w.rank: 0 for w in workers}
    chosen: dict[int, int] = {}
    for rank in moved:
        able = [w for w in workers if rank in w.covers]
        if not able:
            return None
        best = min(able, key=lambda w: (w.next_step != target, load[w.rank], w.rank))
        chosen[rank] = best.rank
        load[best.rank] += 1
    return chosen


def resume(moved: Sequence[int], workers: Sequence[WorkerVote]) -> Resume | None:
    """How a failure goes on, from what the parked workers said. None: the state of a moved rank is lost."""
    target = next_step(workers)
    chosen, seen = sources(moved, workers, target), witnesses(moved, workers, target)
    if chosen is None or seen is None:
        return rollback(moved, workers)
    return Resume(target, chosen, seen)


def witness_slots(slot: int, nodes: int) -> tuple[int, ...]:
    """Whose ranks keep what only the ranks of ``slot`` know: the next slot's, and those of one half the job away, for neighbours
    share racks and switches and are lost together."""
    ahead = dict.fromkeys((slot + offset) % nodes for offset in (1, max(2, nodes // 2)))
    return tuple(other for other in ahead if other != slot)


def witnesses(moved: Sequence[int], workers: Sequence[WorkerVote], target: int) -> dict[int, int] | None:
    """Moved rank -> who keeps what only that rank knew when the step before ``target`` was voted on. None: nobody does."""
    keepers = {rank: min((w.rank for w in workers if rank in w.witnessed.get(target - 1, ())), default=None) for rank in moved}
    found = {rank: keeper for rank, keeper in keepers.items() if keeper is not None}
    return found if len(found) == len(moved) else None


def rollback(moved: Sequence[int], workers: Sequence[WorkerVote]) -> Resume | None:
    """Back to the newest complete snapshot: every parked worker keeps its own copy of it, and somebody that of every moved rank."""
    for step in sorted({s for w in workers for s in w.snapshots}, reverse=True):
        held = {w.rank: w.snapshots.get(step, ()) for w in workers}
        keepers = {rank: min((w for w, ranks in held.items() if rank in ranks), default=None) for rank in moved}
        found = {rank: keeper for rank, keeper in keepers.items() if keeper is not None}
        if len(found) == len(moved) and all(rank in ranks for rank, ranks in held.items()):
            return Resume(step, found, dict(found), rollback=True)
    return None


def worker_votes(votes: Sequence[Vote]) -> tuple[WorkerVote, ...]:
    """All parked workers of all votes, by rank."""
    return tuple(sorted((w for v in votes for w in v.workers), key=lambda w: w.rank))
