"""Judge the open migration: commit, abort or wait. Level-triggered: any coordinator comes to the same verdict from the store alone.

                      all required votes say yes
    preparing ────────────────────────────────────> committed      (the map of base_epoch + 1)
        │  a joiner or voter is gone, a vote says no,
        │  the request was cancelled, the deadline passed
        └──────────────────────────────────────────> aborted       (presumed abort: nothing was promised before the commit)

Required votes: the joiners, all stayers (every group of theirs that holds a moved rank changes), and the leavers of a drain.
A drain commits at the one stop step that all votes name. A failure commits the highest next step that any parked worker names:
somebody who passed the vote of step k proves that all gradients of k were complete. A failure may move nothing: after an aborted one the
stayers are parked, and if nobody has failed any more (a lost lease was taken again) they only have to agree on the step to go on with.
May not know: transactions, clocks (``waited_s`` is told).
"""

from __future__ import annotations

from dataclasses import dataclass

from tmrun.core import planner
from tmrun.core.membership import Job
from tmrun.core.model import Kind, Migration, OpState, Resume, Seat, Spec, Trouble
from tmrun.core.plural import many, some


@dataclass(frozen=True, slots=True)
class Commit:
    """All have said yes."""

    resume: Resume


@dataclass(frozen=True, slots=True)
class Abort:
    """``immovable``: trying again cannot help; the workers must be started anew."""

    reason: str
    immovable: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do yet, and why."""

    reason: str


Verdict = Commit | Abort | Wait

IMMOVABLE = "immovable: "
"""Prefix of the reason of an aborted migration after which only a restart helps; read by the next coordinator, whoever it is."""


def required(job: Job, migration: Migration) -> dict[Seat, str]:
    """Who must vote -> as what."""
    assert job.map is not None
    moved = migration.slots
    roles = {seat: "stayer" for slot, seat in enumerate(job.map.seats) if slot not in moved}
    if migration.kind is Kind.DRAIN:
        roles |= {m.leaver: "leaver" for m in migration.moves}
    return roles | {m.joiner: "joiner" for m in migration.moves}


def missing(job: Job, migration: Migration) -> list[str]:
    """Whose votes are missing, each with its role, for people."""
    return [f"{role} {seat.host}" for seat, role in required(job, migration).items() if seat.host not in job.votes]


def stayers(spec: Spec, migration: Migration) -> str:
    """How many nodes and processes go on untouched, for people."""
    kept = spec.nnodes - len(migration.moves)
    return f"{many(kept, 'node')}, {many(kept * spec.nproc, 'process', 'processes')}"


def judge(job: Job, migration: Migration, waited_s: float) -> Verdict:
    """The verdict on ``migration``, which is open in ``job``; ``waited_s`` since this coordinator first saw it."""
    assert job.spec is not None
    roles = required(job, migration)
    return _obstacle(job, migration, roles) or _count(job, migration, roles) or _overdue(job, migration, waited_s)


def _obstacle(job: Job, migration: Migration, roles: dict[Seat, str]) -> Abort | None:
    assert job.map is not None
    if job.done:
        return Abort("the job is ending: workers of a slot have finished")
    op = job.ops.get(migration.op)
    if op is not None and op.state is not OpState.OPEN:
        return Abort(f"request {op.id} was {op.state.value}")
    if migration.kind is Kind.FAILURE:
        for move in migration.moves:
            if move.slot in job.runs or (job.alive(move.leaver) and not job.trouble(move.slot)):
                return Abort(f"{move.leaver.host} is back")
    troubled = {job.map.seats[i]: t for i, t in job.troubles.items() if job.trouble(i)}
    for seat, role in roles.items():
        if not job.alive(seat):
            return Abort(f"{role} {seat.host} is gone")
        if role == "joiner" and seat.host not in job.votes and not job.members[seat.host].value.warm:
            return Abort(f"joiner {seat.host} is not warm any more")
        against = _against(job, migration, seat, role, troubled.get(seat))
        if against:
            return against
    return None


def _against(job: Job, migration: Migration, seat: Seat, role: str, trouble: Trouble | None) -> Abort | None:
    """A participant that cannot, or said no."""
    if role != "joiner" and trouble is not None:
        return Abort(f"{role} {seat.host} failed: {trouble.text}")
    doubt = job.doubt(seat) if migration.kind is Kind.DRAIN else None
    if doubt is not None:
        return Abort(f"{role} {seat.host}: {doubt.text}")
    vote = job.votes.get(seat.host)
    if vote is None or vote.value.incarnation != seat.incarnation or vote.value.yes:
        return None
    immovable = migration.kind is Kind.FAILURE and role == "stayer" and not vote.value.again
    return Abort((IMMOVABLE if immovable else "") + f"{role} {seat.host}: {vote.value.reason}", immovable)


def _count(job: Job, migration: Migration, roles: dict[Seat, str]) -> Commit | Abort | None:
    votes = [job.votes[s.host].value for s in roles if s.host in job.votes]
    if len(votes) < len(roles):
        return None
    if migration.kind is Kind.DRAIN:
        stops = {v.stop_step for v in votes if v.stop_step is not None}
        if len(stops) != 1:
            return Abort(f"votes name different stop steps: {sorted(stops)}")
        return Commit(Resume(stops.pop()))
    return _count_failure(job, migration)


def _count_failure(job: Job, migration: Migration) -> Commit | Abort:
    assert job.spec is not None
    workers = planner.worker_votes([v.value for v in job.votes.values()])
    moved = [rank for m in migration.moves for rank in job.spec.ranks(m.slot)]
    if not workers:
        return Abort(IMMOVABLE + "no worker survived", True)
    resume = planner.resume(moved, workers)
    if resume is None:
        return Abort(IMMOVABLE + f"no live replica of the state of ranks {moved}", True)
    return Commit(resume)


def _overdue(job: Job, migration: Migration, waited_s: float) -> Verdict:
    assert job.spec is not None
    absent = some(missing(job, migration))
    if waited_s > job.spec.prepare_deadline_s:
        return Abort(f"not prepared within {job.spec.prepare_deadline_s:.0f} s: {absent}")
    return Wait(f"waiting for the votes of {absent}")
