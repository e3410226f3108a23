"""The protocol's transactions: what is guarded, what is written. One function a row of the protocol's table.

The guards are the protocol; removing one breaks an invariant (the model tests do exactly that). May not know: when to use which
(see ``coordinator`` and ``node``), how a transaction is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tmrun.core import placement
from tmrun.core.codec import encode
from tmrun.core.membership import Job
from tmrun.core.model import (
    Admin,
    Cause,
    Comm,
    Done,
    Doubt,
    End,
    Event,
    Eviction,
    Fault,
    Head,
    Host,
    Incident,
    Kind,
    Leader,
    Leaving,
    Member,
    Migration,
    Move,
    Notice,
    Operation,
    OpState,
    Pause,
    Phase,
    RankMap,
    Resume,
    Run,
    Seat,
    Sign,
    Spec,
    Stall,
    Term,
    Trouble,
    Verb,
    Vote,
)
from tmrun.core.txn import Absent, CreatedAt, Delete, DeletePrefix, Guard, ModifiedAt, Op, Put, Txn, ValueIs

MAX_REPLACED = 100
"""Seats that a start map can guard on."""
MAX_NAMED = 8
"""Slots that a transaction's name lists."""


def _as_leader(job: Job) -> tuple[Guard, ...]:
    """The leader key is the one that my election created: nothing of an older coordinator can be written any more."""
    assert job.leader is not None
    return (CreatedAt(job.leader.key, job.leader.created),)


def _head_unchanged(job: Job) -> Guard:
    return ModifiedAt(job.head.key, job.head.modified) if job.head else Absent(job.keys.head)


def _member_unchanged(job: Job, seat: Seat) -> Guard:
    member = job.members[seat.host]
    assert member.value.incarnation == seat.incarnation, seat
    return CreatedAt(member.key, member.created)


def _wishes_as_seen(job: Job, host: Host) -> Guard:
    """No operator has changed what is wanted of the host since the snapshot; in particular a joiner is not drained or cordoned."""
    admin = job.admins.get(host)
    return ValueIs(job.keys.admin(host), encode(admin)) if admin else Absent(job.keys.admin(host))


def _wish(job: Job, admin: Admin) -> Op:
    """Write what is wanted of a host, or nothing when nothing is."""
    key = job.keys.admin(admin.host)
    return Put(key, encode(admin)) if admin.draining or admin.cordoned else Delete(key)


def _wanted(job: Job, host: Host) -> Admin:
    return job.admins.get(host, Admin(host))


def _no_pause_since(job: Job) -> Guard:
    """Nobody has paused the job since the snapshot: once `tmrun pause` has answered, nothing is replaced any more."""
    return ValueIs(job.keys.pause, encode(job.pause)) if job.pause else Absent(job.keys.pause)


def create_spec(job: Job, spec: Spec) -> Txn:
    """The first launcher writes what is launched; all others read it."""
    return Txn((Absent(job.keys.spec),), (Put(job.keys.spec, encode(spec)), Put(job.keys.index, "")), "create spec")


def clear(job: Job) -> Txn:
    """Forget an ended job whose nodes have all left, so that its name can be used again."""
    assert job.end is not None and not job.members
    return Txn((ValueIs(job.keys.end, encode(job.end)),), (DeletePrefix(job.keys.root), Delete(job.keys.index)), "clear the ended job")


def register(job: Job, member: Member, lease: int) -> Txn:
    """Join as this incarnation. Refused while another registration of the host lives.

    Who said that the host was dead was wrong, or is answered by a newer life: a later loss must not be believed because of that.
    """
    key = job.keys.member(member.host)
    return Txn((Absent(key),), (Put(key, encode(member), lease), Delete(job.keys.obituary(member.host))), "register")


def update_member(job: Job, member: Member, lease: int) -> Txn:
    """Change what my registration says, never who I am."""
    key = job.keys.member(member.host)
    return Txn((_member_unchanged(job, member.seat),), (Put(key, encode(member), lease),), "update member")


def elect(job: Job, me: Seat, lease: int) -> Txn:
    """Become coordinator: I read that nobody is, and the term is still the one I read (whoever has been elected since has raised it)."""
    assert job.leader is None
    term = job.term.value.number + 1 if job.term else 1
    same_term: Guard = ModifiedAt(job.term.key, job.term.modified) if job.term else Absent(job.keys.term)
    leader = Leader(me.host, me.incarnation, term)
    ops = (Put(job.keys.leader, encode(leader), lease), Put(job.keys.term, encode(Term(term))))
    return Txn((same_term, _member_unchanged(job, me)), ops, f"elect {me.host} for term {term}")


def start(
    job: Job, seats: tuple[Seat, ...], kind: Kind, reason: str, *, program: bool = False, row: int = 0, failed: Sequence[int] = ()
) -> Txn:
    """Commit a map under which all workers start from scratch: the first one, or a restart.

    Needs no votes: every worker is started anew and fenced by the generation. A seat that died meanwhile is an ordinary failure.
    Whoever loses a seat has not come back since the snapshot, with processes that still run (as far as a transaction can hold the guards:
    of the first ``MAX_REPLACED`` seats). ``failed``: the slots whose failure is to be remembered.
    """
    assert job.open_migration is None
    epoch = job.epoch + 1
    last = job.head.value.last if job.head else 0
    master, port = _master(job, seats[0].host, job.restarts + (kind is Kind.RESTART))
    incidents, places = _incidents(job, failed), _places(job, seats)
    new = RankMap(
        epoch, kind, seats, epoch, reason=reason, incidents=incidents, places=places,
        program=program, row=row, master=master, master_port=port,
    )  # fmt: skip
    ops = (
        Put(job.keys.map(epoch), encode(new)),
        Put(job.keys.head, encode(Head(epoch, 0, last))),
    )
    lost = [old.host for old, new in zip(job.map.seats, seats, strict=True) if old != new] if job.map else []
    guards = (*_as_leader(job), _head_unchanged(job), _no_pause_since(job), *(_member_as_seen(job, h) for h in lost[:MAX_REPLACED]))
    return Txn(guards, ops, f"{kind.value} map of epoch {epoch}")


def _master(job: Job, host: Host, restarts: int) -> tuple[str, int]:
    """(MASTER_ADDR, MASTER_PORT) on slot 0's host: another port after each restart, so that no old worker meets a new one's keys."""
    first = job.members[host].value
    return first.address, first.ports[restarts % len(first.ports)] if first.ports else 0


def propose(job: Job, kind: Kind, moves: tuple[Move, ...], op: str, reason: str) -> Txn:
    """Open a migration; one at a time, because head is the only compare-and-swap point."""
    assert job.head is not None and job.map is not None and job.leader is not None
    head = job.head.value
    assert head.open == 0, head
    number = head.last + 1
    migration = Migration(number, head.epoch, job.leader.value.term, kind, moves, job.map.generation, op=op, reason=reason)
    guards: list[Guard] = [*_as_leader(job), _head_unchanged(job)]
    if kind is Kind.FAILURE:
        guards.append(_no_pause_since(job))
    for move in moves:
        guards += [_member_unchanged(job, move.joiner), _wishes_as_seen(job, move.joiner.host)]
        guards += _leaver_guard(job, kind, move)
    ops = (
        Put(job.keys.head, encode(Head(head.epoch, number, number))),
        Put(job.keys.migration(number), encode(migration)),
    )
    return Txn(tuple(guards), ops, f"propose {kind.value} migration {number}")


def _leaver_guard(job: Job, kind: Kind, move: Move) -> tuple[Guard, ...]:
    """A drained slot's agent is still the same. A failed slot's agent has said that its processes are gone (then its own claim is refused,
    because of what it said), or has not come back: one that has may still have processes, and can claim its slot again."""
    if kind is not Kind.FAILURE:
        return (_member_unchanged(job, move.leaver),)
    return () if job.trouble(move.slot) else (_member_as_seen(job, move.leaver.host),)


def _member_as_seen(job: Job, host: Host) -> Guard:
    """Nobody has registered under this name since the snapshot."""
    member = job.members.get(host)
    return CreatedAt(member.key, member.created) if member else Absent(job.keys.member(host))


def commit(job: Job, resume: Resume) -> Txn:
    """Turn the open migration into the map of the next epoch.

    Votes were read before. They are write-once for a migration and unleased, so what they said stays true as long as it is open, and head
    is written whenever one is opened or decided. A drain's leavers owe word of their processes' end from here on, lease or no lease.
    """
    migration, head = job.open_migration, job.head
    assert migration is not None and head is not None and job.map is not None and job.migration is not None
    epoch = head.value.epoch + 1
    seats = list(job.map.seats)
    for move in migration.moves:
        seats[move.slot] = move.joiner
    old, why, moves = (job.map.master, job.map.master_port), migration.reason, migration.moves
    master, port = _master(job, seats[0].host, job.restarts) if 0 in migration.slots else old
    kept, places, row = job.map.generation, _places(job, seats), job.map.row
    incidents = _incidents(job, [m.slot for m in moves]) if migration.kind is Kind.FAILURE else ()
    new = RankMap(
        epoch, migration.kind, tuple(seats), kept, migration.id, moves, resume, why, incidents, places,
        row=row, master=master, master_port=port,
    )  # fmt: skip
    guards: list[Guard] = [*_as_leader(job), _head_unchanged(job)]
    for move in migration.moves:
        guards += [_member_unchanged(job, move.joiner), *_leaver_guard(job, migration.kind, move)]
    ops: list[Op] = [
        Put(job.keys.map(epoch), encode(new)),
        Put(job.keys.head, encode(Head(epoch, 0, migration.id))),
        Put(job.migration.key, encode(replace(migration, phase=Phase.COMMITTED))),
        Put(job.keys.comm(epoch), encode(Comm(epoch, comm_ids(job)))),
    ]
    ops += [Delete(job.keys.trouble(m.slot)) for m in migration.moves]
    leavers = [m.leaver for m in migration.moves] if migration.kind is Kind.DRAIN else []
    ops += [Put(job.keys.leaving(s.host), encode(Leaving(s.host, s.incarnation, epoch))) for s in leavers]
    return Txn(tuple(guards), tuple(ops), f"commit epoch {epoch}")


def _places(job: Job, seats: Sequence[Seat]) -> tuple[str, ...]:
    """Remembered with the map, because a host that is lost cannot be asked. One that is lost already is where it was."""
    before = job.map.places if job.map else ()
    found = []
    for slot, seat in enumerate(seats):
        member = job.members.get(seat.host)
        known = before[slot] if slot < len(before) else ""
        found.append(placement.place_of(member.value.labels) if member else known)
    return tuple(found) if any(found) else ()


def _incidents(job: Job, slots: Sequence[int]) -> tuple[Incident, ...]:
    """What the job has to remember of these slots' failures; the troubles themselves are forgotten with them."""
    told = [(job.map.seats[i].host, job.trouble(i)) for i in slots] if job.map is not None else []
    return tuple(Incident(h, t.rank, t.cause) if t else Incident(h, -1, Cause.LOST) for h, t in told)


def comm_ids(job: Job) -> dict[str, str]:
    """Group -> bootstrap id of every communicator that the voters rebuilt for the open migration."""
    migration = job.open_migration
    assert migration is not None
    return {g: f"m{migration.id}/{g}" for v in job.votes.values() for g in v.value.groups}


def abort(job: Job, reason: str) -> Txn:
    """Close the open migration without a map. What voters said is kept until the next proposal, for people."""
    assert job.head is not None and job.migration is not None
    head, migration = job.head.value, job.migration.value
    guards = (*_as_leader(job), _head_unchanged(job))
    ops = (
        Put(job.keys.head, encode(Head(head.epoch, 0, head.last))),
        Put(job.migration.key, encode(replace(migration, phase=Phase.ABORTED, reason=reason))),
    )
    return Txn(guards, ops, f"abort migration {migration.id}")


def vote(job: Job, answer: Vote) -> Txn:
    """Write-once for a migration, unleased, and only while I am who I was."""
    assert job.migration is not None and job.migration.value.id == answer.migration
    key = job.keys.vote(answer.host)
    old = job.answers.get(answer.host)
    assert old is None or old.value.migration != answer.migration, old
    first: Guard = ModifiedAt(key, old.modified) if old else Absent(key)
    seat = Seat(answer.host, answer.incarnation)
    guards = (ModifiedAt(job.migration.key, job.migration.modified), first, _member_unchanged(job, seat))
    return Txn(guards, (Put(key, encode(answer)),), f"vote on migration {answer.migration}")


def tell(job: Job, notice: Notice) -> Txn:
    """The coordinator tells all agents what they cannot see of each other."""
    facts = (("ranks can be moved", notice.movable), ("the job is ending", notice.ending), ("the workers have lasted", notice.lasted))
    what = [text for text, true in facts if true]
    what += [f"slot {i} has failed" for i in notice.failed[:MAX_NAMED]]
    what += [f"nodes have been lacking for {notice.short_s:.0f} s"] if notice.short_s else []
    txn = (Put(job.keys.notice, encode(notice)),)
    return Txn((*_as_leader(job), _head_unchanged(job)), txn, f"tell all: {', '.join(what) or 'nothing has failed'}")


def claim(job: Job, run: Run, lease: int) -> Txn:
    """Take a slot's run key: one process group per slot, ever. The map I read names me, and it is still the head."""
    assert job.head is not None and job.map is not None
    seat = Seat(run.host, run.incarnation)
    assert job.map.seats[run.slot] == seat, (job.map.seats[run.slot], seat)
    key = job.keys.run(run.slot)
    old = job.troubles.get(run.slot)  # of an earlier generation
    trouble = job.keys.trouble(run.slot)
    as_seen = ValueIs(trouble, encode(old)) if old else Absent(trouble)  # a late request must not claim what was given up meanwhile
    guards = (Absent(key), as_seen, _member_unchanged(job, seat), _head_unchanged(job))
    return Txn(guards, (Put(key, encode(run), lease),), f"claim slot {run.slot}")


def update_run(job: Job, run: Run, lease: int) -> Txn:
    """Say which epoch and processes my slot runs now."""
    mine = job.runs[run.slot]
    assert mine.value.incarnation == run.incarnation, mine
    return Txn((CreatedAt(mine.key, mine.created),), (Put(mine.key, encode(run), lease),), f"switch slot {run.slot} to epoch {run.epoch}")


def release(job: Job, slot: int, after: Trouble | Done | None = None) -> Txn:
    """Give a slot's run key up, after its processes are confirmed gone; say how they ended in the same breath."""
    mine = job.runs[slot]
    ops: list[Op] = [Delete(mine.key)]
    if isinstance(after, Trouble):
        ops.append(Put(job.keys.trouble(slot), encode(after)))
    if isinstance(after, Done):
        ops.append(Put(job.keys.done(slot), encode(after)))
    if owes_word(job, Seat(mine.value.host, mine.value.incarnation)):
        ops.append(Delete(job.keys.leaving(mine.value.host)))
    return Txn((CreatedAt(mine.key, mine.created),), tuple(ops), f"release slot {slot}")


def owes_word(job: Job, me: Seat) -> bool:
    """True while I owe word that the processes of a slot that I left by a drain are gone."""
    owed = job.leaving.get(me.host)
    return owed is not None and owed.incarnation == me.incarnation


def confirm_left(job: Job, me: Seat) -> Txn:
    """My processes are gone; the run key, which would have told, went before them (the store dropped my lease)."""
    key = job.keys.leaving(me.host)
    return Txn((ValueIs(key, encode(job.leaving[me.host])),), (Delete(key),), f"confirm that {me.host} has left")


def report_trouble(job: Job, trouble: Trouble) -> Txn:
    """A slot that I hold in the map and do not run: its workers never started, or died before I could claim it."""
    seat = Seat(trouble.host, trouble.incarnation)
    guards = (Absent(job.keys.run(trouble.slot)), _member_unchanged(job, seat), _head_unchanged(job))
    return Txn(guards, (Put(job.keys.trouble(trouble.slot), encode(trouble)),), f"report trouble of slot {trouble.slot}")


def finish_op(job: Job, op: Operation, state: OpState, detail: str) -> Txn:
    """Close an operator's request; a cancelled one stays cancelled. A drain that failed leaves its hosts as they were before it. One
    that is done says that they may be switched off: no leaver that was presumed dead has come back, with processes that hand over."""
    done = replace(op, state=state, detail=detail, epoch=job.epoch)
    guards: list[Guard] = [*_as_leader(job), ValueIs(job.keys.op(op.id), encode(op))]
    guards += [_member_as_seen(job, h) for h in op.hosts if state is OpState.DONE and h in job.leaving]
    ops: list[Op] = [Put(job.keys.op(op.id), encode(done))]
    for host in op.hosts if state is OpState.FAILED else ():
        if _wanted(job, host).op == op.id:
            guards.append(_wishes_as_seen(job, host))
            ops.append(_wish(job, _released(job, host)))
    return Txn(tuple(guards), tuple(ops), f"finish {op.id}")


def _released(job: Job, host: Host) -> Admin:
    """Free of its drain; a cordon of its own stays."""
    return replace(_wanted(job, host), draining=False, reason="", op="")


def force(job: Job, op: Operation) -> Txn:
    """A drain that cannot be waited for: its hosts give up what they still hold, under the same request."""
    forced = replace(op, verb=Verb.REPLACE, force_after_s=0.0, gently=True)
    return Txn((*_as_leader(job), ValueIs(job.keys.op(op.id), encode(op))), (Put(job.keys.op(op.id), encode(forced)),), f"force {op.id}")


def hasten(job: Job, op: Operation, me: Seat, force_after_s: float) -> Txn:
    """My machine, which is being drained, is shut down now: the request waits no longer than this from now on, nor than it was to wait
    anyway, and not at all in vain. One for several hosts goes on as it is for the others; a part of it, by the same wish, is mine alone."""
    hastened = replace(op, shutdown=me.incarnation, force_after_s=op.force_after_s or force_after_s)
    as_read = ValueIs(job.keys.op(op.id), encode(op))
    if op.hosts == (me.host,):
        return Txn((as_read,), (Put(job.keys.op(op.id), encode(hastened)),), f"hasten {op.id}")
    part = replace(hastened, id=f"{op.id}-{me.host}", hosts=(me.host,))
    guards = (as_read, Absent(job.keys.op(part.id)), _wishes_as_seen(job, me.host))
    wish = _wish(job, replace(_wanted(job, me.host), op=part.id))
    return Txn(guards, (Put(job.keys.op(part.id), encode(part)), wish), f"hasten {op.id} for {me.host}")


def report_doubt(job: Job, doubt: Doubt, lease: int) -> Txn:
    """My workers lost a connection and wait to be told why."""
    seat = Seat(doubt.host, doubt.incarnation)
    return Txn((_member_unchanged(job, seat),), (Put(job.keys.doubt(doubt.host), encode(doubt), lease),), f"report doubt of {doubt.host}")


def report_stall(job: Job, seat: Seat, signs: tuple[Sign, ...], lease: int) -> Txn:
    """How my workers look that make no progress; no signs: they move again."""
    key = job.keys.stall(seat.host)
    op = Put(key, encode(Stall(seat.host, seat.incarnation, job.epoch, signs)), lease) if signs else Delete(key)
    return Txn((_member_unchanged(job, seat),), (op,), f"report {'a stall' if signs else 'progress'} of {seat.host}")


def evict(job: Job, orders: tuple[Eviction, ...]) -> Txn:
    """Order nodes to end their workers of this epoch; they report it as any other trouble."""
    guards = (*_as_leader(job), *(_member_unchanged(job, Seat(o.host, o.incarnation)) for o in orders))
    return Txn(
        guards,
        tuple(Put(job.keys.eviction(o.host), encode(o)) for o in orders),
        f"{'evict' if all(o.act for o in orders) else 'blame'} {', '.join(o.host for o in orders)}",
    )


def end_job(job: Job, end: End, *, as_leader: bool) -> Txn:
    """Write how the job ended, once. The coordinator guards on its term; an operator's stop needs no coordinator."""
    guards = (Absent(job.keys.end), *(_as_leader(job) if as_leader else ()))
    return Txn(guards, (Put(job.keys.end, encode(end)),), f"end job: {end.state.value}")


def request(job: Job, op: Operation) -> Txn:
    """An operator's drain or replacement: the hosts are cordoned and the request is recorded at once; an existing request is left alone."""
    guards: list[Guard] = [Absent(job.keys.op(op.id)), Absent(job.keys.end)]
    ops: list[Op] = [Put(job.keys.op(op.id), encode(op))]
    for host in op.hosts:
        guards.append(_wishes_as_seen(job, host))
        ops.append(_wish(job, replace(_wanted(job, host), draining=True, reason=op.reason, op=op.id)))
    return Txn(tuple(guards), tuple(ops), f"request {op.verb.value} {op.id}")


def cordon(job: Job, hosts: tuple[Host, ...], reason: str) -> Txn:
    """Never choose these hosts as joiners; their ranks stay."""
    return _change_cordon(job, [replace(_wanted(job, h), cordoned=True, cordon_reason=reason) for h in hosts], "cordon")


def uncordon(job: Job, hosts: tuple[Host, ...]) -> Txn:
    """These hosts may be chosen again; a drain stays a drain."""
    return _change_cordon(job, [replace(_wanted(job, h), cordoned=False, cordon_reason="") for h in hosts], "uncordon")


def _change_cordon(job: Job, wanted: list[Admin], name: str) -> Txn:
    return Txn(tuple(_wishes_as_seen(job, a.host) for a in wanted), tuple(_wish(job, a) for a in wanted), name)


def pause(job: Job, why: Pause) -> Txn:
    """Stop automatic replacement."""
    return Txn((Absent(job.keys.pause), Absent(job.keys.end)), (Put(job.keys.pause, encode(why)),), "pause")


def resume(job: Job) -> Txn:
    """Automatic replacement goes on."""
    assert job.pause is not None
    return Txn((_no_pause_since(job),), (Delete(job.keys.pause),), "resume")


def inflict(job: Job, fault: Fault, told: Event) -> Txn:
    """An operator asks this life of a node to do something to itself, and the story says so. What was asked before is over."""
    old, key = job.faults.get(fault.host), job.keys.fault(fault.host)
    as_seen: Guard = ValueIs(key, encode(old)) if old else Absent(key)
    guards = (as_seen, Absent(job.keys.end), _member_unchanged(job, Seat(fault.host, fault.incarnation)))
    ops = (Put(key, encode(fault)), Put(job.keys.event(fault.id, 1), encode(told)))
    return Txn(guards, ops, f"inflict {fault.id}")


def take_fault(job: Job, fault: Fault, told: str) -> Txn:
    """Its agent is going to do it: nobody does it again, and it cannot be taken back any more."""
    key = job.keys.fault(fault.host)
    return Txn((ValueIs(key, encode(fault)),), (Put(key, encode(replace(fault, told=told))),), f"take {fault.id}")


def withdraw_fault(job: Job, fault: Fault) -> Txn:
    """Take a fault back that has not been taken."""
    key = job.keys.fault(fault.host)
    return Txn((ValueIs(key, encode(fault)),), (Delete(key),), f"withdraw {fault.id}")


def withdraw_drain(job: Job, hosts: tuple[Host, ...], op: Operation | None, detail: str) -> Txn:
    """Undrain hosts; with ``op`` also cancel that request, unless its migration has been committed meanwhile."""
    guards: list[Guard] = [_head_unchanged(job)]
    ops: list[Op] = []
    for host in hosts:
        guards.append(_wishes_as_seen(job, host))
        ops.append(_wish(job, _released(job, host)))
    if op is not None:
        guards.append(ValueIs(job.keys.op(op.id), encode(op)))
        ops.append(Put(job.keys.op(op.id), encode(replace(op, state=OpState.CANCELLED, detail=detail))))
    return Txn(tuple(guards), tuple(ops), "undrain")
