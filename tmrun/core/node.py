"""One node: what its agent knows (``Node``), what it learns (facts, ``observe``), what it can do (effects; ``reconcile`` chooses).

The workers of a node are one *group*: they start, move and end together.

    no group ──seated by a start map──> active ──all exit 0──> done          (release the slot, say so)
       │                                │  └──commit names another seat──> left   (state handed over; then release)
       │                                └──any exits otherwise──> trouble    (kill the rest, release the slot, say what was seen)
       └──no seat, not draining──> standby ──commit names me──> active

Nothing is remembered that the store knows. May not know: snapshots, processes, sockets, stores, clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tmrun.core.model import (
    Kind,
    Machine,
    Migration,
    RankMap,
    Rehearsal,
    Seat,
    Sign,
    WorkerVote,
)
from tmrun.core.txn import Txn

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
    echoes: frozenset[int] = frozenset()
    """Local ranks that ended because they lost a peer, as they say themselves."""
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
    before: frozenset[int] = frozenset()
    """Local ranks that had ended by then: what the others end with says nothing."""
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

    @property
    def failed_first(self) -> tuple[int, ...]:
        """Local ranks that ended otherwise than with 0 before their agent killed the rest, if it did; in the order of their ends."""
        return tuple(r for r, code in self.exits.items() if code and (r in self.before or not self.killed))

    def unwished(self, pid: int) -> bool:
        """This process holds a rank, and its agent has not told it to end: that it ends is for people to know. A rehearsal is none."""
        return self.purpose is Purpose.ACTIVE and pid in self.pids and not self.killed


@dataclass(frozen=True, slots=True)
class Node:
    """What an agent knows of itself."""

    me: Seat
    lease: int
    group: Group | None = None
    started_generation: int = 0
    standby_failures: int = 0
    """Rehearsals that failed in a row in ``failed_generation``."""
    failed_generation: int = 0
    standby_error: str = ""
    start_error: str = ""
    """Why the workers of its slot could not even be started, the last time it tried."""


# -- facts --------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawned:
    """Processes were started."""

    group: Group


@dataclass(frozen=True, slots=True)
class NotSpawned:
    """The machine refused to start them; none is left."""

    effect: Spawn
    error: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process ended; ``code`` as a shell shows it."""

    pid: int
    code: int
    error: str = ""
    step: int = -1
    """In which it was, as far as is known."""
    out_of_memory: bool = False
    echo: bool = False
    """It says itself that it only lost a peer."""


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
class Rested:
    """Its rehearsals failed, and some time has passed since."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The agent has (another) lease."""

    lease: int


Fact = (
    Spawned
    | NotSpawned
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
    | Rested
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
        return replace(node, group=fact.group, started_generation=started, start_error="")
    if isinstance(fact, NotSpawned):
        return _not_spawned(node, fact)
    if isinstance(fact, Leased):
        return replace(node, lease=fact.lease)
    if isinstance(fact, Rested):
        return replace(node, standby_failures=0)
    if node.group is None:
        return node
    if isinstance(fact, Forgotten):
        return _forget(node, node.group)
    if isinstance(fact, WorkersStall):
        return replace(node, group=replace(node.group, signs=fact.signs))
    return replace(node, group=_observe_group(node.group, fact))


def _not_spawned(node: Node, fact: NotSpawned) -> Node:
    if fact.effect.purpose is Purpose.STANDBY:
        return _rehearsal_failed(node, fact.effect.generation, fact.error)
    return replace(node, started_generation=fact.effect.generation, start_error=fact.error)


def _forget(node: Node, group: Group) -> Node:
    told = group.failed_first or tuple(group.errors)
    errors = " ".join(group.errors[r] for r in told if r in group.errors)
    over = replace(node, group=None, standby_error=errors)
    failed_standby = group.purpose is Purpose.STANDBY and (not group.killed or bool(group.failed_first))
    return _rehearsal_failed(over, group.generation, errors) if failed_standby else replace(over, standby_failures=0)


def _rehearsal_failed(node: Node, generation: int, error: str) -> Node:
    before = node.standby_failures if generation == node.failed_generation else 0
    return replace(node, standby_failures=before + 1, failed_generation=generation, standby_error=error)


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
            return group if group.killed else replace(group, killed=reason, before=frozenset(group.exits))
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
    echoes = group.echoes | {rank} if fact.echo else group.echoes
    known = replace(group, step=max(group.step, fact.step), out_of_memory=group.out_of_memory or fact.out_of_memory)
    return replace(known, exits={**group.exits, rank: fact.code}, errors=errors, echoes=echoes)


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
        doubt=group.doubt if effect.map.kind is Kind.DRAIN else "",  # parked workers wait on: only a failure's commit is an answer
        signs=(),
    )


def submit(txn: Txn, then: Fact | None = None, say: str = "") -> Submit:
    """An effect that says what the transaction says of itself."""
    return Submit(txn, txn.name, then, say)
