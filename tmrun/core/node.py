"""One node: what its agent knows (``Node``), what it learns (facts, ``observe``), what it does next (effects, ``reconcile``).

The workers of a node are one *group*: they start, move and end together.

    no group ──seated by a start map──> active ──all exit 0──> done          (release the slot, say so)
       │                                │  └──commit names another seat──> left   (state handed over; then release)
       │                                └──any exits otherwise──> trouble    (kill the rest, release the slot, say what was seen)
       └──no seat, not draining──> standby ──commit names me──> active

Level-triggered: ``reconcile`` compares what is wanted (the snapshot) with what is there (the node) and returns one effect; the shell
executes it, feeds the facts back and asks again. Safe at any time, any number of times; nothing is remembered that the store knows.
May not know: processes, sockets, stores, clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tmrun.core import admission, policy, transactions
from tmrun.core import migration as judging
from tmrun.core.failure import is_echo
from tmrun.core.membership import Job, natural
from tmrun.core.model import (
    Cause,
    Done,
    Doubt,
    End,
    Evidence,
    Host,
    Incarnation,
    JobState,
    Kind,
    Machine,
    Migration,
    Phase,
    RankMap,
    Rehearsal,
    Run,
    Seat,
    Sign,
    Spec,
    Trouble,
    Vote,
    WorkerVote,
)
from tmrun.core.txn import Txn

MAX_STANDBY_FAILURES = 3
"""Rehearsals that may fail in a row before the node is no standby any more."""

KILLED = 137
"""128 + SIGKILL."""
MAX_RECORDED = 8
"""Slots whose ranks keep a record of their own for rehearsals; all others share one a role."""


SIGTERM = 15


class Purpose(str, Enum):
    """What a group of workers is for."""

    ACTIVE = "active"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one worker said about a migration: prepared, or refused with a reason."""

    stop_step: int | None = None
    vote: WorkerVote | None = None
    groups: frozenset[str] = frozenset()
    refused: str = ""
    again: bool = False
    """A refusal that another attempt may turn into a yes."""


@dataclass(frozen=True, slots=True)
class Group:
    """The worker processes of this node. ``slot``: the one they hold, or rehearse for (standby)."""

    purpose: Purpose
    slot: int
    epoch: int
    generation: int
    pids: tuple[int, ...]
    exits: Mapping[int, int] = field(default_factory=dict)
    """local rank -> exit code as a shell shows it (128 + n for a signal), in the order of their ends."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """local rank -> what is known of why it ended."""
    doubt: str = ""
    """A connection that a worker lost, nobody knows yet why; of the current epoch."""
    joined: frozenset[int] = frozenset()
    warm: frozenset[int] = frozenset()
    machines: Mapping[int, Machine] = field(default_factory=dict)
    """local rank -> what it runs on, once it has said so."""
    rehearsal: Rehearsal | None = None
    left: frozenset[int] = frozenset()
    migration: int = 0
    """The migration that the workers were last asked to prepare for."""
    answers: Mapping[int, Answer] = field(default_factory=dict)
    abort_sent: int = 0
    commit_sent: int = 0
    """The epoch of the last Commit sent."""
    killed: str = ""
    """Why the agent killed them, if it did."""
    step: int = -1
    """In which the first that ended was, as far as is known."""
    out_of_memory: bool = False
    """The kernel killed one of them for want of memory."""
    signs: tuple[Sign, ...] = ()
    """How they look while they make no progress; empty: they move."""

    @property
    def gone(self) -> bool:
        """Every process is confirmed to have ended."""
        return len(self.exits) == len(self.pids)

    @property
    def failed(self) -> bool:
        """Some process ended otherwise than with 0."""
        return any(self.exits.values())


@dataclass(frozen=True, slots=True)
class Node:
    """What an agent knows of itself."""

    me: Seat
    lease: int
    group: Group | None = None
    started_generation: int = 0
    standby_failures: int = 0
    standby_error: str = ""


# -- facts --------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawned:
    """Processes were started."""

    group: Group


@dataclass(frozen=True, slots=True)
class Exited:
    """A process ended; ``code`` as a shell shows it."""

    pid: int
    code: int
    error: str = ""
    step: int = -1
    """In which it was, as far as is known."""
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker reached ``run.steps``."""

    local_rank: int


@dataclass(frozen=True, slots=True)
class WorkerWarm:
    """A standby process is parked."""

    local_rank: int
    machine: Machine = field(default_factory=Machine)
    rehearsal: Rehearsal | None = None


@dataclass(frozen=True, slots=True)
class WorkerMeasured:
    """A live worker has done some steps."""

    local_rank: int
    machine: Machine


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker is prepared for a migration, or refuses."""

    local_rank: int
    migration: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A drained worker handed its state over."""

    local_rank: int


@dataclass(frozen=True, slots=True)
class WorkerDoubts:
    """A worker lost a connection and waits."""

    local_rank: int
    text: str


@dataclass(frozen=True, slots=True)
class WorkersStall:
    """These make no progress; no signs: they move again."""

    signs: tuple[Sign, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """A message of an effect was written to every worker."""

    effect: Prepare | Commit | Abort


@dataclass(frozen=True, slots=True)
class Killing:
    """The processes were told to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The group is over and accounted for."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The agent has (another) lease."""

    lease: int


Fact = (
    Spawned
    | Exited
    | WorkerJoined
    | WorkerWarm
    | WorkerMeasured
    | WorkerAnswered
    | WorkerLeft
    | WorkerDoubts
    | WorkersStall
    | Sent
    | Killing
    | Forgotten
    | Leased
)


# -- effects ------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the workers of a slot."""

    purpose: Purpose
    slot: int
    epoch: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the workers; ``gently``: with this signal and a grace period first."""

    reason: str
    gently: bool = False
    signal: int = SIGTERM


@dataclass(frozen=True, slots=True)
class Prepare:
    """Tell the workers of ``slot`` to prepare."""

    migration: Migration
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Tell the workers to switch to ``map``; ``comm`` is what the store says now of the changed communicators."""

    map: RankMap
    slot: int
    comm: Mapping[str, str]
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the workers that a migration is off."""

    migration: int
    reason: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a transaction; when it succeeded, ``then`` is a fact and ``say`` is worth a line."""

    txn: Txn
    reason: str
    then: Fact | None = None
    say: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Nothing outside changes; fold this fact."""

    fact: Fact
    reason: str


@dataclass(frozen=True, slots=True)
class Quit:
    """The agent's work is over."""

    exit_code: int
    reason: str


Effect = Spawn | Kill | Prepare | Commit | Abort | Submit | Note | Quit


def observe(node: Node, fact: Fact) -> Node:
    """Fold one fact. A fact about processes that are not (any more) ours changes nothing."""
    if isinstance(fact, Spawned):
        started = fact.group.generation if fact.group.purpose is Purpose.ACTIVE else node.started_generation
        return replace(node, group=fact.group, started_generation=started)
    if isinstance(fact, Leased):
        return replace(node, lease=fact.lease)
    if node.group is None:
        return node
    if isinstance(fact, Forgotten):
        return _forget(node, node.group)
    if isinstance(fact, WorkersStall):
        return replace(node, group=replace(node.group, signs=fact.signs))
    return replace(node, group=_observe_group(node.group, fact))


def _forget(node: Node, group: Group) -> Node:
    failed_standby = group.purpose is Purpose.STANDBY and not group.killed
    errors = " ".join(group.errors.values())
    failures = node.standby_failures + 1 if failed_standby else 0
    return replace(node, group=None, standby_failures=failures, standby_error=errors)


def _observe_group(group: Group, fact: Fact) -> Group:
    match fact:
        case Exited():
            return _exited(group, fact)
        case WorkerJoined(rank):
            return replace(group, joined=group.joined | {rank})
        case WorkerWarm(rank, machine, rehearsal):
            machines = {**group.machines, rank: machine}
            return replace(group, warm=group.warm | {rank}, machines=machines, rehearsal=rehearsal)
        case WorkerMeasured(rank, machine):
            return replace(group, machines={**group.machines, rank: machine})
        case WorkerDoubts(_, text):
            return replace(group, doubt=group.doubt or text)
        case WorkerLeft(rank):
            return replace(group, left=group.left | {rank})
        case WorkerAnswered(rank, migration, answer):
            return replace(group, answers={**group.answers, rank: answer}) if migration == group.migration else group
        case Killing(reason):
            return replace(group, killed=group.killed or reason)
        case Sent(effect):
            return _sent(group, effect)
        case _:
            return group


def _exited(group: Group, fact: Exited) -> Group:
    if fact.pid not in group.pids:
        return group
    rank = group.pids.index(fact.pid)
    if rank in group.exits:
        return group
    errors = {**group.errors, rank: fact.error} if fact.error else group.errors
    known = replace(group, step=max(group.step, fact.step), out_of_memory=group.out_of_memory or fact.out_of_memory)
    return replace(known, exits={**group.exits, rank: fact.code}, errors=errors)


def _sent(group: Group, effect: Prepare | Commit | Abort) -> Group:
    if isinstance(effect, Prepare):
        return replace(group, migration=effect.migration.id, answers={})
    if isinstance(effect, Abort):
        return replace(group, abort_sent=effect.migration)
    stays = effect.slot >= 0
    purpose = Purpose.ACTIVE if stays else group.purpose
    slot = effect.slot if stays else group.slot
    return replace(
        group,
        commit_sent=effect.map.epoch,
        epoch=effect.map.epoch,
        purpose=purpose,
        slot=slot,
        generation=effect.map.generation,
        doubt="",
        signs=(),
    )


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
        return _idle(node, job, job.map)
    if group.failed or group.killed:
        return _ended_badly(node, job, group)
    if group.gone:
        return _ended_well(node, job, group)
    frozen = _frozen(node, job, group)
    if frozen:
        return Kill(frozen)
    if group.purpose is Purpose.ACTIVE and group.generation < job.map.generation:
        return Kill(f"restart as generation {job.map.generation}", gently=not group.joined)
    if group.purpose is Purpose.STANDBY and _seated_unprepared(node, job, group, job.map):
        return Kill(f"epoch {job.map.epoch} gives this node ranks that these workers are not prepared for")
    return _migration(node, job, group) or (_active if group.purpose is Purpose.ACTIVE else _standby)(node, job, group, job.map)


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
        return None if node.group.killed else Kill(f"job {job.end.state.value}", gently=True, signal=_stop_signal(job.end))
    return Quit(job.end.exit_code, f"job {job.end.state.value}: {job.end.reason}")


def _stop_signal(end: End) -> int:
    """What stopped the job is passed on to its workers, as by torchrun."""
    number = end.exit_code - 128
    return number if end.state is JobState.STOPPED and 0 < number < 32 else SIGTERM


# -- no workers ---------------------------------------------------------------------------------------------------------------------
def _idle(node: Node, job: Job, current: RankMap) -> Effect | None:
    if transactions.owes_word(job, node.me):
        return _submit(transactions.confirm_left(job, node.me))
    stray = _stray_claim(node, job, current)
    if stray is not None:
        return _submit(transactions.release(job, stray))
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
        return _submit(transactions.release(job, slot, trouble) if held else transactions.report_trouble(job, trouble))
    run = Run(slot, node.me.host, node.me.incarnation, current.epoch)
    if held is None:
        return _submit(transactions.claim(job, run, node.lease))
    if held.value != run:
        return _submit(transactions.update_run(job, run, node.lease))
    return Spawn(Purpose.ACTIVE, slot, current.epoch, current.generation, f"epoch {current.epoch} gives me slot {slot}")


def _submit(txn: Txn, then: Fact | None = None, say: str = "") -> Submit:
    return Submit(txn, txn.name, then, say)


def _trouble(node: Node, current: RankMap, slot: int, text: str) -> Trouble:
    return Trouble(slot, node.me.host, node.me.incarnation, current.epoch, -1, 1, text, software=False)


def _idle_standby(node: Node, job: Job, current: RankMap) -> Effect | None:
    member = job.members.get(node.me.host)
    if member is None or member.value.incarnation != node.me.incarnation:
        return None
    if node.standby_failures >= MAX_STANDBY_FAILURES and not member.value.fault:
        fault = f"its rehearsal failed {node.standby_failures} times: {node.standby_error or 'see its log'}"
        return _submit(
            transactions.update_member(job, replace(member.value, warm=False, fault=fault), node.lease), say=f"{node.me.host}: {fault}"
        )
    if member.value.warm:
        return _submit(transactions.update_member(job, replace(member.value, warm=False), node.lease))
    if job.draining(node.me.host) or member.value.fault or not job.told.movable or job.told.ending:
        return None
    return Spawn(Purpose.STANDBY, _likely_slot(node, job, current), 0, current.generation, "standby: rehearse")


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


# -- workers that ended -------------------------------------------------------------------------------------------------------------
def _ended_badly(node: Node, job: Job, group: Group) -> Effect | None:
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
        return _submit(transactions.release(job, group.slot), Forgotten())
    if group.generation < job.map.generation:
        return Note(Forgotten(), "stopped for the restart")
    trouble = _first_failure(node, job, group)
    return _submit(transactions.release(job, group.slot, trouble), Forgotten(), say=f"{node.me.host} rank {trouble.rank}: {trouble.text}")


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
    return _submit(transactions.report_trouble(job, trouble), Forgotten(), say=say)


def _first_failure(node: Node, job: Job, group: Group) -> Trouble:
    assert job.spec is not None and job.map is not None
    ended = {r: c for r, c in group.exits.items() if c}
    local, code = next(((r, c) for r, c in ended.items() if not is_echo(c, group.errors.get(r, ""), ())), next(iter(ended.items()), (0, 1)))
    text = group.errors.get(local) or (f"killed by signal {code - 128}" if code > 128 else f"exit code {code}")
    order = job.replacement(node.me.host)
    if order is not None:
        code, text = KILLED, f"replaced by an operator ({order.reason})"
    rank = job.spec.ranks(group.slot)[local]
    hung = job.evicted(node.me)
    if hung is not None and group.killed == hung.text:
        return _trouble_of(node, job, group, hung.rank, code, hung.text, Cause.HANG)
    return _trouble_of(node, job, group, rank, code, text, policy.cause_of(code, out_of_memory=group.out_of_memory))


def _trouble_of(node: Node, job: Job, group: Group, rank: int, code: int, text: str, cause: Cause) -> Trouble:
    crashed = cause is Cause.CRASH and not group.joined  # what can only be restarted is restarted as often as it was allowed to
    software = cause is Cause.PROGRAM or crashed
    echo = software and is_echo(code, text, ())
    return Trouble(group.slot, node.me.host, node.me.incarnation, job.epoch, rank, code, text, software, echo, cause, group.step)


def _ended_well(node: Node, job: Job, group: Group) -> Effect:
    held = job.runs.get(group.slot)
    if held is None or held.value.incarnation != node.me.incarnation or group.purpose is Purpose.STANDBY:
        return Note(Forgotten(), "those workers are accounted for")
    if group.left or (job.map is not None and job.map.seats[group.slot] != node.me):
        return _submit(transactions.release(job, group.slot), Forgotten())  # a leaver; its word may come after its end
    return _submit(transactions.release(job, group.slot, Done(group.slot, group.epoch)), Forgotten())


# -- living workers -----------------------------------------------------------------------------------------------------------------
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
        return _submit(transactions.vote(job, Vote(node.me.host, node.me.incarnation, current.id, False, refused.refused, refused.again)))
    if len(group.answers) < len(group.pids):
        return None
    return _submit(transactions.vote(job, _yes(node, group, current.id)))


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
        return _submit(transactions.claim(job, run, node.lease)) if job.alive(node.me) else None
    if held.value.incarnation == node.me.incarnation and held.value != run:
        return _submit(transactions.update_run(job, run, node.lease))
    return None


def _active(node: Node, job: Job, group: Group, current: RankMap) -> Effect | None:
    if current.seats[group.slot] == node.me:
        if job.replacement(node.me.host):
            return Kill("an operator replaces this node")
        return _claim(node, job, group, current, group.slot) or _cool(node, job) or _stall(node, job, group) or _doubt(node, job, group)
    if group.commit_sent == current.epoch and not job.told_failed(group.slot):
        return _stuck(job, group, current)  # it hands its state over
    return Kill(f"slot {group.slot} belongs to {current.seats[group.slot].host} now")


def _stuck(job: Job, group: Group, current: RankMap) -> Effect | None:
    """Somebody was lost after a drain's commit: leavers that are not at the stop step yet cannot get there, and must not wait for it."""
    if not (job.told.epoch == job.epoch and job.told.failed) or group.abort_sent == current.migration:
        return None
    return Abort(current.migration, "a rank was lost before its stop step, perhaps")


def _cool(node: Node, job: Job) -> Effect | None:
    """A member that holds a slot is no warm standby."""
    member = job.members.get(node.me.host)
    if member is None or member.value.incarnation != node.me.incarnation or not member.value.warm:
        return None
    return _submit(transactions.update_member(job, replace(member.value, warm=False), node.lease))


def _stall(node: Node, job: Job, group: Group) -> Effect | None:
    """Say how our workers look while they make no progress, and that they do again."""
    told = job.stalls.get(node.me.host)
    known = told.signs if told is not None and (told.incarnation, told.epoch) == (node.me.incarnation, job.epoch) else ()
    if known == group.signs or not job.alive(node.me):
        return None
    return _submit(transactions.report_stall(job, node.me, group.signs, node.lease))


def _doubt(node: Node, job: Job, group: Group) -> Effect | None:
    """Say once an epoch that our workers wait for an explanation, and who of them waits no more."""
    assert job.spec is not None
    told, ranks = job.doubts.get(node.me.host), job.spec.ranks(group.slot)
    ended = tuple(sorted(ranks[local] for local in group.exits))
    if not group.doubt or not job.alive(node.me) or (told is not None and (told.epoch, told.ended) == (job.epoch, ended)):
        return None
    doubt = Doubt(Host(node.me.host), Incarnation(node.me.incarnation), job.epoch, group.doubt, ended)
    return _submit(transactions.report_doubt(job, doubt, node.lease))


def _standby(node: Node, job: Job, group: Group, current: RankMap) -> Effect | None:
    if job.draining(node.me.host):
        return Kill("this node is drained")
    member = job.members.get(node.me.host)
    if member is None or member.value.incarnation != node.me.incarnation:
        return None
    warm = len(group.warm) == len(group.pids)
    if member.value.warm == warm:
        return None
    say = f"{node.me.host} is a warm standby" if warm else ""
    told = replace(member.value, warm=warm, machine=_machine(group), rehearsal=group.rehearsal)
    return _submit(transactions.update_member(job, told, node.lease), say=say)


def _machine(group: Group) -> Machine | None:
    """Of the weakest worker, once all have said."""
    return admission.weakest(list(group.machines.values())) if len(group.machines) == len(group.pids) else None
