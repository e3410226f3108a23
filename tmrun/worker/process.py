"""What the parts of the runtime share: one training process's identity, channels, registered state and counters.

Only data and small questions; the rules are in ``runtime`` (the loop and the step), ``stayer`` (drains and failures), ``standby``
(rehearsing and taking over) and ``mail`` (what the agent says). May not know: those.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch.distributed as dist

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.core.model import Gpu
from tmrun.worker import vote
from tmrun.worker.ballots import Ledger
from tmrun.worker.board import Board, Pending
from tmrun.worker.comm import MISUSE, SIGNS
from tmrun.worker.coverage import FirstStep, Meter
from tmrun.worker.gpu_health import Probe
from tmrun.worker.identity import Identity
from tmrun.worker.link import Link
from tmrun.worker.live import Live
from tmrun.worker.neighbours import Neighbours
from tmrun.worker.pace import Pace
from tmrun.worker.priority import Priority
from tmrun.worker.pulse import Pulse
from tmrun.worker.record import Recorder, Replay
from tmrun.worker.snapshot import Snapshots
from tmrun.worker.state import State
from tmrun.worker.tour import Tour
from tmrun.worker.transfer import UnderWay

SETTLED_STEPS = 3
"""Optimizer state appears in the first step, DDP rebuilds its buckets after it (with a static graph after the second): a joiner needs
both, stayers too before they switch."""


class SoftRestart(BaseException):
    """Unwinds a standby's script, to run it again as another rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.tmrun_restart_as = rank


class StepLost(BaseException):
    """Unwinds a step's block after its vote was lost; ``Step.__exit__`` swallows it."""


class VoteBroken(RuntimeError):
    """The vote could not be held."""


class Phase(Enum):
    """Where the script is."""

    BOOT = "starting"
    READY = "before run.steps"
    LOOP = "in the loop"
    DONE = "after the loop"


@dataclass
class Trouble:
    """The first sign of a failure, not dealt with yet."""

    since: float
    error: BaseException | None = None


@dataclass
class Counters:
    """``done``: steps that happened in this process (or its rehearsal); ``since_reset``: since DDP last forgot its buckets."""

    done: int = 0
    since_reset: int = 0


@dataclass
class Process:
    """See the module's text."""

    who: Identity
    link: Link
    live: Live
    sandboxed: bool
    """Whether process groups are stand-ins."""
    pulse: Pulse
    board: Board = field(default_factory=Board)
    state: State = field(default_factory=State)
    ledger: Ledger = field(default_factory=Ledger)
    counters: Counters = field(default_factory=Counters)
    pace: Pace = field(default_factory=Pace)
    phase: Phase = Phase.BOOT
    total: int = 0
    trouble: Trouble | None = None
    on_role: Callable[[int], None] | None = None
    """The script's own part of taking another rank (``tmrun.join``)."""
    initialise_again: Callable[[], None] | None = None
    """The script's init_process_group, to be called once more."""
    under_way: list[UnderWay] = field(default_factory=list)
    """What is still being sent after a switch."""
    recorder: Recorder | FirstStep | None = None
    """Until this process's first live step is done: it records for others, or finds out what its own rehearsal missed."""
    meter: Meter = field(default_factory=Meter)
    priority: Priority = field(default_factory=Priority)
    probe: Probe | None = None
    """Of the GPU, once the loop began on one."""
    warmed: set[str] = field(default_factory=set)
    """Backends whose first use this process has behind it."""
    neighbours: Neighbours | None = None
    """The other standby processes of this node."""
    inside: dict[str, int] = field(default_factory=dict)
    """MB/s between them, by backend."""
    replay: Replay | None = None
    """While rehearsing."""
    snapshots: Snapshots = field(init=False)
    tour: Tour = field(init=False)

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.live.new_store, self.link.send)
        self.tour = Tour(self.who.rank, self.live.new_store)

    @property
    def rank(self) -> int:
        """Our rank, rehearsed or real."""
        return self.who.rank

    @property
    def world(self) -> int:
        """Number of ranks; never changes."""
        return self.who.world

    @property
    def witnesses(self) -> tuple[int, ...]:
        """Ranks that keep what only we know."""
        return vote.witnesses_of(self.rank, self.world, self.who.local_world)

    @property
    def wards(self) -> tuple[int, ...]:
        """Ranks of which we keep it."""
        return vote.wards_of(self.rank, self.world, self.who.local_world)

    def peers_of(self, rank: int) -> set[int]:
        """With whom it has connections for votes."""
        return vote.peers_of(rank, self.world, self.who.local_world)

    def leaves(self, pending: Pending) -> bool:
        """Whether a migration lets this process go."""
        return not pending.failure and self.rank in pending.prepare.ranks

    def report_progress(self, number: int) -> None:
        """Tell the agent which step begins."""
        self.link.send(wire.Progress(number, self.pace.step_s))

    def gpus(self, patience_s: float) -> tuple[Gpu, ...]:
        """How well the GPU is, as far as it was found out."""
        return self.probe.result(patience_s) if self.probe is not None else ()

    def tell_transfer(self, done: int, total: int) -> None:
        """Tell the agent how much of our state has arrived."""
        if self.pace.due() or done == total:
            self.link.send(wire.Receiving(done, total))

    def is_communication(self, error: BaseException) -> bool:
        """Whether an error belongs to a lost connection. Once a failure is reported any does: bodies then run on garbage."""
        if isinstance(error, StepLost | VoteBroken | dist.DistNetworkError):
            return True
        if isinstance(error, WorkerError | KeyboardInterrupt | SystemExit | GeneratorExit | SoftRestart):
            return False
        if self.trouble is not None and not isinstance(error, Exception):
            return True  # torch's CheckpointException, which collects what went wrong inside
        if self.board.failure is not None or self.live.failing:
            return True
        if isinstance(error, dist.DistBackendError):
            return not any(sign in str(error) for sign in MISUSE)
        return any(isinstance(e, RuntimeError) and any(sign in str(e) for sign in SIGNS) for e in _with_causes(error))

    def note_hidden(self) -> None:
        """Remember an error that was hidden from the script, if there was one."""
        if self.trouble is None and (hidden := self.live.hidden_error):
            self.note_trouble(dist.DistBackendError(hidden))

    def note_trouble(self, error: BaseException) -> None:
        """Remember the first sign."""
        if self.trouble is not None:
            return
        self.trouble = Trouble(time.monotonic(), error)
        if self.board.failure is None:
            lines = re.sub(r"^\s*\[[^\]]*\]\s*", "", str(error)).splitlines() or [type(error).__name__]  # without the C++ file and line
            first = lines[0].split(". This is typically caused")[0]  # gloo's guess
            self.link.send(wire.Suspect(self.counters.done, f"rank {self.rank}: {first[:120]}"))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised from: pipeline schedules wrap what they catch."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
