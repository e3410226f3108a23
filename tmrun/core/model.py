"""The nouns of the control plane, as immutable values.

Every record that is stored is one of these (``codec`` writes it, ``keys`` says where). May not know: stores, sockets, time, torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

Host = NewType("Host", str)
"""A node's name, unique in the job."""
Incarnation = NewType("Incarnation", str)
"""One life of an agent process; a restarted agent has another."""


class Kind(str, Enum):
    """Why a map replaces another. ``initial`` and ``restart`` start every worker anew; the others move single slots."""

    INITIAL = "initial"
    DRAIN = "drain"
    FAILURE = "failure"
    RESTART = "restart"


PARK_SHARE = 0.4
"""An agent that has not renewed its lease for this share of the TTL stops its workers where they are, unless their steps prove that the
others live."""
FENCE_SHARE = 0.5
"""... and ends them after this share, unless they have stopped."""
PARK_PROOF_SHARE = 0.9
"""As ``PROOF_SHARE``, for the first of the two."""
PROOF_SHARE = 1.0
"""That step k completes proves that all ranks lived after this one entered the vote of k - 1; it protects so long from then on."""
FENCED_SHARE = 1.2
"""Once some stayer has entered no vote for this share of the TTL, an agent that is cut off has ended its workers: nobody can have completed
a step that this stayer has not entered, so their last proof is at least as old; and a margin for the killing."""


UNSEEN_SHARE = 1.5
"""... when no stayer can tell: so long after its lease ran out. Steps may have gone on for a moment after that, until somebody stopped."""


class Phase(str, Enum):
    """Where a migration stands. Absent phase change for long = its coordinator died; the next one adopts or aborts it."""

    PREPARING = "preparing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class OpState(str, Enum):
    """Where an operator's request stands."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Verb(str, Enum):
    """What an operator asks for: ranks that are handed over, or given up at once."""

    DRAIN = "drain"
    REPLACE = "replace"


class JobState(str, Enum):
    """What ``status`` says of a job."""

    RENDEZVOUS = "rendezvous"
    RUNNING = "running"
    MIGRATING = "migrating"
    WAITING = "waiting_for_nodes"
    RECOVERING = "recovering"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class NodeState(str, Enum):
    """What ``status`` says of a node."""

    JOINING = "joining"
    WARMING = "warming"
    STANDBY = "standby"
    ACTIVE = "active"
    DRAINING = "draining"
    DRAINED = "drained"
    FAILED = "failed"
    SUSPECT = "suspect"
    """It holds a slot, its lease is gone, and nobody confirms that it is dead."""
    DOWN = "down"


class Cause(str, Enum):
    """Of a failure, as far as anybody can tell; see ``policy``."""

    PROGRAM = "program"
    CRASH = "crash"
    KILLED = "killed"
    MEMORY = "memory"
    DISK = "disk"
    """Full, or failing."""
    HANG = "hang"
    LOST = "lost"
    """A node that is gone."""


class Evidence(str, Enum):
    """What speaks against a worker that makes no progress; see ``watchdog``."""

    NONE = ""
    STOPPED = "stopped"
    MUTE = "mute"
    LATE = "late"
    LEFT = "left"
    """Its loop is over, so it takes part in no step any more. Only of weight while others are in a later step."""

    @property
    def stuck(self) -> bool:
        """Whether it says by itself that the worker should move and does not."""
        return self not in (Evidence.NONE, Evidence.LEFT)


@dataclass(frozen=True, slots=True)
class Sign:
    """How a worker looks from outside while the job hangs. ``place``: a ``watchdog.Place``; ``where``: its innermost line of code."""

    rank: int
    place: str
    step: int
    operations: int
    evidence: Evidence
    since_s: float
    where: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """What was launched; written once. ``command`` is what follows the flags: script (or ``-m module``) and its arguments, as the host that
    was first gave them; every host runs its own."""

    nnodes: int
    nproc: int
    standby: int
    command: tuple[str, ...]
    max_restarts: int = 3
    lease_ttl_s: int = 6
    join_wait_s: float = 30.0
    prepare_deadline_s: float = 300.0
    node_wait_s: float = 600.0
    role: str = "default"
    """ROLE_NAME of all workers."""
    no_python: bool = False
    """``command`` is a program of its own, not a script for Python."""
    virtual_local_rank: bool = False
    """Every worker sees one device, as device 0, and LOCAL_RANK=0."""
    hang_timeout: str = "auto"
    """See ``watchdog.limits``."""
    straggler: str = "notify"
    """What to do about a node that computes slower than the others: ``off``, ``notify``, ``drain``."""
    hang_action: str = "replace"
    """``replace`` the node of the rank that keeps the others waiting, or only ``notify``."""

    @property
    def world(self) -> int:
        """WORLD_SIZE, constant for the life of the job."""
        return self.nnodes * self.nproc

    def ranks(self, slot: int) -> tuple[int, ...]:
        """Global ranks of a slot, in local-rank order."""
        return tuple(range(slot * self.nproc, (slot + 1) * self.nproc))


@dataclass(frozen=True, slots=True)
class Seat:
    """Who holds a slot: a host in one of its lives."""

    host: Host
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Gpu:
    """How well an accelerator is, as far as a worker could find out; see ``gpus``. Empty, 0 and -1: not known, or nothing to tell.

    ``uncorrected``: memory errors since its last reset. ``throttled``: why its clock is low. ``slowdown_c``: where it slows down.
    ``links_up``: NVLinks. ``xids``: of it in the kernel's log. ``tflops``, ``copy_gb_s``: of a short test.
    """

    name: str
    kind: str = ""
    uncorrected: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    throttled: tuple[str, ...] = ()
    temperature_c: int = 0
    slowdown_c: int = 0
    links_up: int = -1
    xids: tuple[int, ...] = ()
    tflops: float = 0.0
    copy_gb_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker runs on and takes, as it found out itself; of a node, of its weakest worker. Empty and 0: not known.

    ``software``: name -> version. ``memory_mb``: what one worker may use of its device; ``peak_mb``: the most that it has used.
    ``step_s``: median step; a rehearsed one has no communication in it. ``gpus``: accelerators that torch finds here; ``gpus_used``: those
    of them that hold memory of its processes, by a name that is the same for every process of the machine.
    """

    device: str = ""
    driver: str = ""
    software: dict[str, str] = field(default_factory=dict)
    memory_mb: int = 0
    peak_mb: int = 0
    step_s: float = 0.0
    gpus: int = 0
    gpus_used: tuple[str, ...] = ()
    health: tuple[Gpu, ...] = ()
    """Of those that are used."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a worker's rehearsal warmed; of a node, of its last worker to be warm.

    ``rank``: the one that was rehearsed. ``seconds``: of the longest pass, if it rehearsed more than one. ``replayed``: collectives that
    were given what the live ranks recorded; ``synthesised``: collective -> calls that were given made-up values. ``compiled``: graphs that
    torch.compile made. ``waiting_mb``: what it takes of its device while it waits: in tensors, kept by torch (them included), on the whole
    device; empty without one. ``also``: ranks of other roles that it has rehearsed too. ``inside``: backend and device -> MB/s that the
    node's workers reached when they summed up a tensor; empty for a single one.
    """

    rank: int
    seconds: float
    steps: int
    replayed: int = 0
    synthesised: dict[str, int] = field(default_factory=dict)
    compiled: int = 0
    waiting_mb: dict[str, int] = field(default_factory=dict)
    also: tuple[int, ...] = ()
    inside: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Member:
    """A live registration, under the agent's lease. ``warm``: its standby processes have rehearsed and are parked."""

    host: Host
    incarnation: Incarnation
    address: str
    pid: int
    version: str
    warm: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    """Why this node cannot be a standby (its rehearsal fails); empty when it can."""
    machine: Machine | None = None
    """As a warm standby's workers found it."""
    rehearsal: Rehearsal | None = None
    node_rank: int = -1
    """The slot that its launcher asked for; -1: any."""
    ports: tuple[int, ...] = ()
    """Where its agent serves a TCPStore when it has slot 0: one port a restart, in turn."""
    witness: str = ""
    """Who can confirm its death, asked when connections break; empty: nobody."""
    store_members: int = 0
    """Of how many etcds the job's store consists, if this host runs one of them; 0: it does not."""

    @property
    def seat(self) -> Seat:
        """This member as a map would name it."""
        return Seat(self.host, self.incarnation)


@dataclass(frozen=True, slots=True)
class Notice:
    """What agents need of each other, told by the coordinator, because they see only what is their own.

    ``movable``: workers of ``generation`` have reached ``run.steps``. ``ending``: some slot's workers have finished. ``failed``: slots of
    the map of ``epoch`` whose seat is gone, or its workers, and that nobody is replacing yet. For the coordinators to come: ``lasted``, the
    generation has trained so long that losing it is no crash loop (``restarts``); ``short_s``, nodes have been lacking for so long.
    """

    generation: int
    movable: bool = False
    ending: bool = False
    epoch: int = 0
    failed: tuple[int, ...] = ()
    lasted: bool = False
    short_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Term:
    """Number of the last election; rises strictly."""

    number: int


@dataclass(frozen=True, slots=True)
class Leader:
    """The elected coordinator, under its lease."""

    host: Host
    incarnation: Incarnation
    term: int


@dataclass(frozen=True, slots=True)
class Head:
    """The one compare-and-swap point. ``open``: id of the undecided migration or 0. ``last``: highest migration id ever used."""

    epoch: int
    open: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """One slot's change of seat."""

    slot: int
    leaver: Seat
    joiner: Seat


@dataclass(frozen=True, slots=True)
class Resume:
    """How everybody goes on after a migration.

    ``target``: the step that runs next. ``sources``: moved rank -> rank that sends it its state. ``witness``: moved rank -> rank that
    passed the last vote before ``target`` and so knows what the moved rank said in it (random state, data position).
    ``rollback``: a shard without a replica was lost; everybody goes back to the snapshot of ``target``, sources send copies they keep.
    """

    target: int
    sources: dict[int, int] = field(default_factory=dict)
    witness: dict[int, int] = field(default_factory=dict)
    rollback: bool = False


@dataclass(frozen=True, slots=True)
class Incident:
    """Why a slot moved. ``rank``: the one that failed first, -1 for a whole node."""

    host: Host
    rank: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class RankMap:
    """The committed map of one epoch: ``seats[slot]``. Never rewritten.

    ``generation``: epoch at which all workers last started from scratch.
    """

    epoch: int
    kind: Kind
    seats: tuple[Seat, ...]
    generation: int
    migration: int = 0
    moves: tuple[Move, ...] = ()
    resume: Resume = Resume(0)
    reason: str = ""
    incidents: tuple[Incident, ...] = ()
    """Of a failure: one a moved slot. Of a restart: one a slot that its machine failed, or seemed to."""
    places: tuple[str, ...] = ()
    """Where each slot's host is (``placement``), as it said when it took the slot; empty when nobody has labels."""
    program: bool = False
    """A restart that the program's own error caused; those have a budget of their own."""
    row: int = 0
    """Restarts for lost machines in a row, none of whose generations lasted."""
    master: str = ""
    """Address of slot 0's host."""
    master_port: int = 0
    """Where its agent serves the TCPStore of the workers that this map starts."""

    def slot_of(self, seat: Seat) -> int | None:
        """The slot this exact incarnation holds, if any."""
        return self.seats.index(seat) if seat in self.seats else None

    def slot_of_host(self, host: Host) -> int | None:
        """The slot any incarnation of this host holds, if any."""
        return next((i for i, s in enumerate(self.seats) if s.host == host), None)


@dataclass(frozen=True, slots=True)
class Migration:
    """A proposed change from ``base_epoch`` to the next, and how it ended."""

    id: int
    base_epoch: int
    term: int
    kind: Kind
    moves: tuple[Move, ...]
    generation: int
    phase: Phase = Phase.PREPARING
    op: str = ""
    reason: str = ""

    @property
    def slots(self) -> frozenset[int]:
        """The slots that move."""
        return frozenset(m.slot for m in self.moves)


@dataclass(frozen=True, slots=True)
class WorkerVote:
    """What one parked worker said in a failure: the step it is in, the step it would run next, whose replica it is.

    ``snapshots``: step -> the ranks whose state at its start this worker keeps a copy of (its own, and the rank's it is partner of).
    ``witnessed``: step -> the moved ranks of which it keeps what only they know (random state, data position), as of that step's vote.
    """

    rank: int
    step: int
    next_step: int
    covers: tuple[int, ...] = ()
    snapshots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    witnessed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    idle_s: float = 0.0
    """Since it last entered a step's vote, by its own clock, when it said this."""


@dataclass(frozen=True, slots=True)
class Vote:
    """A node's write-once answer: my workers are prepared, have not passed ``stop_step`` and will wait there.

    It stays until the node's next answer, to another ``migration``.
    """

    host: Host
    incarnation: Incarnation
    migration: int
    yes: bool
    reason: str = ""
    again: bool = False
    """A no that another attempt may turn into a yes."""
    stop_step: int | None = None
    workers: tuple[WorkerVote, ...] = ()
    groups: tuple[str, ...] = ()
    """Names of the process groups that were rebuilt."""


@dataclass(frozen=True, slots=True)
class Comm:
    """Bootstrap ids of the communicators that changed at an epoch: group name -> id under which its members find each other.

    The *delta unique ids* that workers re-read at the barrier (TrainMover, OSDI 2026, two-phase delta CCL).
    """

    epoch: int
    ids: dict[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """Mutual exclusion: who runs the processes of a slot, under that agent's lease."""

    slot: int
    host: Host
    incarnation: Incarnation
    epoch: int
    pids: tuple[int, ...] = ()
    joined: bool = False
    """All workers reached ``run.steps``: from here on ranks can be moved instead of restarted."""
    machine: Machine | None = None
    """As its workers found it after some steps: what a standby is compared with."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A live agent reports that its workers of a slot are gone (all of them, confirmed), and what was seen first."""

    slot: int
    host: Host
    incarnation: Incarnation
    epoch: int
    rank: int
    exit_code: int
    """As a shell shows it: the worker's own code, 128 + n for a signal."""
    text: str
    software: bool
    """True when the program itself gave up (an exception, a non-zero exit); such an error follows the ranks."""
    echo: bool = False
    """It says itself that it only lost a peer (``failure.is_echo``): what happened to that peer is the cause."""
    cause: Cause = Cause.KILLED
    step: int = -1
    """In which the worker was; -1 if unknown."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Workers of a live node lost a connection and wait to be told why. Nobody may have died: a link can break alone.

    ``ended``: ranks of the same node whose processes ended well meanwhile.
    """

    host: Host
    incarnation: Incarnation
    epoch: int
    text: str
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stall:
    """An agent reports that its workers make no progress: how each of them looks. Leased; gone when they move again."""

    host: Host
    incarnation: Incarnation
    epoch: int
    signs: tuple[Sign, ...]


@dataclass(frozen=True, slots=True)
class Eviction:
    """The coordinator found that ``rank`` of this node keeps the job waiting in ``epoch``: its agent ends its workers, as after a crash."""

    host: Host
    incarnation: Incarnation
    epoch: int
    rank: int
    text: str
    act: bool = True
    """False: told for people only."""


@dataclass(frozen=True, slots=True)
class Obituary:
    """Someone who can know (the launcher that saw the agent exit) confirms that this incarnation and its workers are dead."""

    host: Host
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Leaving:
    """Written by a drain's commit, not leased; the leaver deletes it once its processes are confirmed gone.

    A run key can vanish before that, when the store drops a lease early."""

    host: Host
    incarnation: Incarnation
    epoch: int


@dataclass(frozen=True, slots=True)
class Done:
    """All workers of a slot ended with exit code 0."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Admin:
    """What operators want of a host. ``draining``: it must not hold ranks; ``op`` says how they leave it. ``cordoned``: it is never chosen
    as a joiner, its ranks stay. Both have a reason of their own."""

    host: Host
    draining: bool = False
    reason: str = ""
    op: str = ""
    cordoned: bool = False
    cordon_reason: str = ""


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator has stopped automatic replacement: no failed slot is moved, nothing is restarted. Drains that were asked for go on."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator's request, idempotent by its id."""

    id: str
    verb: Verb
    hosts: tuple[Host, ...]
    reason: str = ""
    to: str = ""
    force_after_s: float = 0.0
    """A drain that is not committed after this long becomes a replacement; 0: it waits."""
    shutdown: str = ""
    """The life of its node whose machine is shut down (SIGTERM), if so: it becomes one as soon as nobody could take the ranks over."""
    gently: bool = False
    """A replacement that was a drain: the workers get SIGTERM and the grace period."""
    state: OpState = OpState.OPEN
    detail: str = ""
    epoch: int = 0


class FaultKind(str, Enum):
    """What an operator does to a node on purpose."""

    KILL = "kill"
    """SIGKILL."""
    FREEZE = "freeze"
    """SIGSTOP, for good."""
    PARTITION = "partition"
    """For ``seconds`` the node is silent: its agent reaches no store, its workers stand still."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An operator's request to this life of a node: it does that to itself, at most once. ``agent``: to the agent, else to the worker with
    this local rank. ``told``: what its agent is going to do, said before it is done."""

    id: str
    host: Host
    incarnation: Incarnation
    kind: FaultKind
    agent: bool = False
    local_rank: int = 0
    seconds: float = 0.0
    told: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """How the job ended; written once. ``exit_code`` is what every launcher of the job returns."""

    state: JobState
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a node's workers are; ``step_s`` is the median duration of the last steps in seconds, 0 if unknown. ``time``: when that was
    so by the writer's wall clock, for people only. ``busy_s``: what its slowest worker computes of a step, without waiting for others.
    ``epoch``: the map under which they run."""

    host: Host
    step: int
    step_s: float
    time: float = 0.0
    busy_s: float = 0.0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Lag:
    """An agent waits so long for the store's answers, lately; 0: they are quick again. For people."""

    host: Host
    incarnation: Incarnation
    seconds: float


@dataclass(frozen=True, slots=True)
class Receiving:
    """How much state a node's joiners have received: rank -> (bytes so far, bytes in all)."""

    host: Host
    ranks: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Timing:
    """One worker's own account of a switch, seconds of its own clock; ``role`` is stayer or joiner."""

    rank: int
    role: str
    phases: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    redo_s: float = 0.0
    pause_s: float = 0.0
    resumed: bool = False
    cold: dict[str, int] = field(default_factory=dict)
    """A joiner's first step: what its rehearsal had not warmed, counted by kind."""
    rebuilt: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Names of its process groups that have new connections, and of those that keep theirs."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Of one worker's state, where no other rank holds the like: how often, how large, how long training waited, how long sending took."""

    every: int
    bytes: int
    copy_s: float
    send_s: float

    def is_news(self, told: int) -> bool:
        """Whether they come at least twice, or half, as often as ``told``; 0: nothing was told."""
        return self.every >= 2 * told or 2 * self.every <= told

    @property
    def text(self) -> str:
        """For people."""
        when = "every step" if self.every == 1 else f"every {self.every} steps"
        waits = f"training waits {1e3 * self.copy_s:.1f} ms for each, sending takes {1e3 * self.send_s:.0f} ms"
        return f"{self.bytes / 1e6:,.1f} MB a rank go to a partner's memory {when}; {waits}"


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's end that was not wished for, as its agent saw it; for people. ``time`` is the agent's wall clock."""

    host: Host
    slot: int
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    """As a shell shows it."""
    time: float
    epoch: int = 0
    """Of the map under which it ran."""
    signal: str = ""
    """Name of the signal that ended it, if one did."""
    message: str = ""
    """Type and text of the exception, where the worker left it in its error file."""
    traceback: str = ""
    tail: tuple[str, ...] = ()
    """Its last lines on stderr."""
    log: str = ""
    """Folder of its logs; empty: none are kept."""
    hint: str = ""
    echo: bool = False
    """It says itself that it only lost a peer: not the cause."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the job's story; ``kind``: see ``story``. ``time`` is the writer's wall clock, for people only."""

    time: float
    host: Host
    text: str
    kind: str = ""
