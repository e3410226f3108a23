"""Agent <-> worker messages over a unix socket.

A worker opens one *control* channel (messages below, both ways, no replies) and any number of *store* channels (one request, one
reply; used by process groups to find each other). Frames are a 4-byte big-endian length and UTF-8 JSON. Nothing is pickled.
May not know: torch, etcd, who decides what.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass, field
from enum import Enum

from tmrun.core import codec
from tmrun.core.errors import WireError
from tmrun.core.model import Copies, Machine, Rehearsal

MAX_FRAME = 16 << 20

# -- the worker's environment, beside torchrun's ------------------------------------------------------------------------------------
ENV_SOCKET = "TMRUN_AGENT_SOCKET"
"""Path of the agent's unix socket. Its presence is what makes a process a tmrun worker."""
ENV_ROLE = "TMRUN_WORKER_ROLE"
"""``active`` or ``standby``."""
ENV_LOCAL_RANK = "TMRUN_LOCAL_RANK"
"""Which of the node's workers this is; LOCAL_RANK may be virtual."""
ENV_WORKER = "TMRUN_WORKER_PID"
"""Pid of the worker itself, set by its bootstrap; a child inherits it and knows by it that it is none."""
ENV_EPOCH = "TMRUN_EPOCH"
"""Epoch that spawned this process (0 for a standby)."""
ENV_GENERATION = "TMRUN_GENERATION"
"""Epoch at which the whole job last started from scratch; scopes the base store, the same for all ranks and for joiners."""
ENV_REHEARSAL_LOG = "TMRUN_REHEARSAL_LOG"
"""File that takes a standby's output while it rehearses."""
ENV_REHEARSING = "TMRUN_REHEARSING"
"""``1`` in a process that rehearses, for code that cannot reach ``run.rehearsing``."""
ENV_RECORD_BYTES = "TMRUN_RECORD_BYTES"
"""Largest tensor, in bytes, that is recorded whole in the first step, for rehearsals; 0 records nothing."""
ENV_RECORDS = "TMRUN_RECORDS"
"""``1`` in a rank that a standby is going to rehearse: what it records is kept for exactly that rank."""
ENV_RECORD_WAIT = "TMRUN_RECORD_WAIT_S"
"""How long a rehearsal waits for the live ranks' recorded values; set by an agent whose job trains."""
ENV_ROLES = "TMRUN_REHEARSE_ROLES"
"""``0``: a standby rehearses the rank that it was given only; set by an agent whose standby has failed."""
ENV_NEIGHBOURS = "TMRUN_NEIGHBOURS"
"""The same for all standby processes that an agent starts together, and for no others."""
ENV_SHARE_COMPILED = "TMRUN_SHARE_COMPILED"
"""``1``: what torch.compile made on live ranks is given to workers of other hosts that run alike. Whoever can write to the job's store can
then run code in them."""
ENV_SNAPSHOT_EVERY = "TMRUN_SNAPSHOT_EVERY"
"""Steps between two snapshots of state that has no replica; measured when unset."""
ENV_PARENT = "TMRUN_PARENT_PID"
"""Process id of whoever spawned the worker; a worker that finds another parent ends at once."""


class Channel(str, Enum):
    """What a connection is for; said in Hello."""

    CONTROL = "control"
    STORE = "store"


class Kind(str, Enum):
    """Why ranks move."""

    DRAIN = "drain"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Hello:
    """worker -> agent, the first frame of every connection."""

    channel: Channel
    local_rank: int
    pid: int


# -- worker -> agent ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Joined:
    """The script reached ``run.steps``; ``total`` steps are planned. From here on this rank can be moved."""

    total: int


@dataclass(frozen=True, slots=True)
class Warm:
    """A standby finished rehearsing and is parked."""

    machine: Machine
    rehearsal: Rehearsal

    @property
    def rank(self) -> int:
        """The rank that was rehearsed."""
        return self.rehearsal.rank


@dataclass(frozen=True, slots=True)
class Measured:
    """What a live worker runs on, once it has done some steps. Sent once in the life of a process as a rank."""

    machine: Machine


@dataclass(frozen=True, slots=True)
class Progress:
    """Step ``step`` begins (at most ~20 a second are sent); ``step_s`` is the median of the last steps, 0 if unknown."""

    step: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Receiving:
    """A joiner has received so many bytes of its state (at most ~20 a second are sent)."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """My side of the migration is built.

    drain, stayer and leaver: ``stop_step`` = the boundary at which this rank waits for Commit or Abort; all ranks report the same.
    failure, stayer: parked; ``step`` is the step it is in or about to begin, ``next_step`` the one it would run next: step + 1 when
    its vote passed. ``covers`` are the moved ranks whose tensors it holds as a replica, ``snapshots``: step -> the ranks whose state at
    its start it keeps a copy of, ``witnessed``: step -> the moved ranks of which it keeps what they said in that step's vote, ``idle_s``:
    since it last entered a vote.
    joiner: everything is None / empty.
    ``groups`` names the process groups that were rebuilt and their global ranks; ``kept``, in a failure, those that keep their
    connections because no operation can have been under way in them.
    """

    migration: int
    stop_step: int | None = None
    step: int | None = None
    next_step: int | None = None
    covers: tuple[int, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    snapshots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    witnessed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """My side cannot be prepared (too early, a group could not be built); the migration has to be aborted.

    ``again``: another attempt may succeed; else only starting everybody anew helps after a failure.
    """

    migration: int
    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Suspect:
    """A connection broke and no Prepare has explained it: this rank waits. Sent once an epoch."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Switched:
    """This worker now runs in ``epoch``. ``phases`` in seconds, of this process's own clock.

    stayer: ``detect`` (first sign of trouble -> notice), ``wait`` (notice -> commit), ``switch``, ``state`` (sending, if it was a source).
    joiner: ``bind`` (notice -> ready to build), ``comm`` (building groups), ``switch``, ``state`` (receiving).
    ``rebuilt`` names this rank's process groups that have new connections, ``kept`` those that keep theirs.
    """

    epoch: int
    step: int
    phases: dict[str, float]
    bytes: int = 0
    rebuilt: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of my state is in a partner's memory, as it was before ``step``; ``every``: as far as I am asked."""

    step: int
    copies: Copies


@dataclass(frozen=True, slots=True)
class Resumed:
    """First step after a switch is done.

    ``redo_s``: from resuming until the end of the redone step, 0 when none was redone. ``pause_s``: end of the last step before ->
    end of the first new step, less the median step.
    """

    epoch: int
    step: int
    redo_s: float
    pause_s: float
    cold: dict[str, int] = field(default_factory=dict)
    """A joiner's: what its rehearsal had not warmed, counted by kind."""


@dataclass(frozen=True, slots=True)
class Left:
    """A drain's leaver handed its state over, the joiner confirmed it; this process ends now with exit code 0."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The loop ended after ``step`` steps; only the script's tail is left."""

    step: int


# -- agent -> worker ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Prepare:
    """Get ready to replace the processes of ``ranks``. In a failure: stop waiting for them at once.

    ``rank``: the rank that the receiver has, or is to take if it is a standby. ``generation``: scopes the base store.
    """

    migration: int
    kind: Kind
    epoch: int
    ranks: tuple[int, ...]
    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The map of ``epoch`` is committed: switch.

    ``target``: the step that everyone runs next. drain: the stop step. failure: a stayer with ``step < target`` whose vote was lost
    still applies its update (late commit), all others redo or begin ``target``. ``sources``: moved rank -> rank that sends its state.
    ``comm``: group name -> bootstrap id, as read from the store at the commit; a prepared group with another id must not be used.
    ``witness``: moved rank -> a stayer that keeps what only that rank knew (random state, data position), as said in the vote of
    ``target - 1``. Empty in a drain.
    ``rollback`` (failure): everybody goes back to the snapshot of ``target``; sources send the copies that they keep, witnesses nothing.
    """

    migration: int
    epoch: int
    target: int
    sources: dict[int, int]
    comm: dict[str, str]
    witness: dict[int, int] = field(default_factory=dict)
    rollback: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """The migration is off: drop what was prepared. After a failure another Prepare follows.

    To a leaver, after a drain's Commit: a rank was lost; if the stop step is not reached yet it cannot be, so end.
    """

    migration: int
    reason: str


@dataclass(frozen=True, slots=True)
class Park:
    """Others may take this node for dead: stop where you are, with your state, and wait for a decision as if a peer were lost."""


# -- store channel ------------------------------------------------------------------------------------------------------------------
class StoreOp(str, Enum):
    """What c10d's Store interface needs."""

    SET = "set"
    GET = "get"
    ADD = "add"
    CHECK = "check"
    WAIT = "wait"
    COMPARE_SET = "compare_set"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """GET and WAIT block until the keys exist or ``timeout_s`` is over. ``value`` and ``expected`` are base64 text."""

    op: StoreOp
    keys: tuple[str, ...]
    value: str = ""
    expected: str = ""
    amount: int = 0
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class StoreReply:
    """``error`` is empty on success, ``timeout`` when the keys did not appear; ``found`` answers CHECK and DELETE."""

    value: str = ""
    number: int = 0
    found: bool = False
    error: str = ""


Message = (
    Hello | Joined | Warm | Measured | Progress | Receiving | Prepared | Refused | Suspect | Switched | Copied | Resumed | Left | Finished
    | Prepare | Commit | Abort | Park | StoreRequest | StoreReply
)  # fmt: skip
_TYPES: dict[str, type[Message]] = {
    t.__name__: t
    for t in (
        Hello, Joined, Warm, Measured, Progress, Receiving, Prepared, Refused, Suspect, Switched, Copied, Resumed, Left, Finished,
        Prepare, Commit, Abort, Park, StoreRequest, StoreReply,
    )
}  # fmt: skip


def send(sock: socket.socket, message: Message) -> None:
    """Write one frame. Raises OSError when the peer is gone. Not safe for concurrent senders of one socket."""
    body = json.dumps({"t": type(message).__name__, **codec.to_plain(message)}, separators=(",", ":")).encode()
    sock.sendall(struct.pack(">I", len(body)) + body)


def receive(sock: socket.socket) -> Message | None:
    """Read one frame; None at an orderly end of the stream. Raises WireError, OSError."""
    head = _exactly(sock, 4)
    if head is None:
        return None
    (length,) = struct.unpack(">I", head)
    if length > MAX_FRAME:
        raise WireError(f"frame of {length} bytes exceeds {MAX_FRAME}")
    body = _exactly(sock, length)
    if body is None:
        return None
    return _parse(body)


def _parse(body: bytes) -> Message:
    data = json.loads(body)
    kind = _TYPES.get(data.pop("t", ""))
    if kind is None:
        raise WireError(f"unknown message {body[:80]!r}; agent and worker run different versions of tmrun")
    try:
        return codec.from_plain(kind, data)
    except codec.CodecError as error:
        raise WireError(str(error)) from None


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    chunks: list[bytes] = []
    while count:
        chunk = sock.recv(count)
        if not chunk:
            return None
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
