"""What this process shows of itself to whoever watches it from outside: a heartbeat, where it is, how long it computes.

The heartbeat is a thread: it beats while the interpreter runs any thread at all, so a held GIL stops it and a blocked main thread does
not. ``operations`` counts the collectives of the whole world that were entered in this step (DDP's too, which Python never sees), so that
those who wait in one can be told from whoever did not come. *Busy* time is a step's time less what was spent waiting for others, as far
as that is visible: the vote, the script's own collectives, the end of DDP's backward pass (from its own samples). FSDP's waits are not.
Whether torch.compile is at work is heard from torch itself: the first step of a compiled model may take minutes.
On ``DUMP_SIGNAL`` the stacks of all threads go to stderr's file for them, whoever holds the GIL.
May not know: who watches, what follows.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from tmrun.beacon import DUMP_SIGNAL, ENV_BEACON, Beacon, dump_path
from tmrun.core.watchdog import Place
from tmrun.worker.groups import Group, Switch

_BEAT_S = 0.2
_SAMPLE_EVERY = 8
"""Steps between two samples of DDP's waiting."""


class Pulse:
    """Written by the main thread, but for the heartbeat's own fields (``ticks``, ``operations``) and ``compiling``."""

    def __init__(self, beacon: Beacon) -> None:
        self._beacon = beacon
        self._counting: tuple[tuple[Switch, ...], int] = ((), 0)
        self._began = 0
        self._waited = 0
        self._ddp_waited = 0
        self._steps = 0
        self._voted = 0
        self._idle_since = _boot_ns()

    def start(self, path: str | None) -> None:
        """Begin to beat. ``path`` of the beacon: stacks are written beside it."""
        if path:
            self._stacks = open(dump_path(Path(path)), "w")  # noqa: SIM115  open for the life of the process
            faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
            self._beacon.set("dumps", 1)
        threading.Thread(target=self._beat, name="tmrun-pulse", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._beacon.add("ticks")
            self._beacon.set("operations", self._operations())
            self.hear_compiler()
            time.sleep(_BEAT_S)

    def hear_compiler(self) -> None:
        """Be told when torch.compile begins and ends, once the script has made torch load it; its ``reset`` forgets who listens."""
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and self._compiles not in handler.start_callbacks:
            handler.register_start_callback(self._compiles)
        if handler is not None and self._compiled not in handler.end_callbacks:
            handler.register_end_callback(self._compiled)

    def _compiles(self, _: object) -> None:
        self._beacon.set("compiling", 1)

    def _compiled(self, _: object) -> None:
        self._beacon.set("compiling", 0)

    def _operations(self) -> int:
        switches, before = self._counting
        return max(0, sum(s.started for s in switches) - before)

    def at(self, place: Place) -> None:
        """The main thread is there now."""
        self._beacon.set("place", place)

    def begin(self, epoch: int, step: int, groups: Iterable[Group], world: int) -> None:
        """A step begins."""
        switches = tuple(g.switch for g in groups if len(g.ranks) == world)
        self._counting = switches, sum(s.started for s in switches)
        self._waited, self._began = 0, time.monotonic_ns()
        beacon = self._beacon
        beacon.set("operations", 0)
        beacon.set("epoch", epoch)
        beacon.set("step", step)
        beacon.set("place", Place.STEP)

    @contextlib.contextmanager
    def voting(self) -> Iterator[None]:
        """Around a step's vote. That it completes proves that all ranks have lived after we entered the one before."""
        before, self._voted = self._voted, _boot_ns()
        self._idle_since = self._voted
        self.at(Place.VOTE)
        with self.waiting():
            yield
        self.at(Place.STEP)
        if before:
            self._beacon.set("proven_ns", before)

    def cut(self) -> None:
        """From the link thread: the connections are cut, so that no step can be completed before ``switched``."""
        self._beacon.set("cut", 1)

    def switched(self) -> None:
        """Training goes on in another epoch: a vote of the old one proves nothing about its members."""
        self._beacon.set("cut", 0)
        self._voted, self._idle_since = 0, _boot_ns()

    @property
    def idle_s(self) -> float:
        """Since the last vote was entered: nobody can have completed a later one."""
        return (_boot_ns() - self._idle_since) / 1e9

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for others."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self._waited += time.monotonic_ns() - began

    def done(self, ddps: Iterable[DistributedDataParallel]) -> None:
        """The step happened."""
        self._steps += 1
        if self._steps % _SAMPLE_EVERY == 0:
            self._ddp_waited = sum(_ddp_wait(model) for model in ddps)
        wall = time.monotonic_ns() - self._began
        self._beacon.add("wall_ns", wall)
        self._beacon.add("busy_ns", max(0, wall - self._waited - self._ddp_waited))
        self._beacon.add("counted")


def _boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def from_environment() -> Pulse:
    """The pulse of a process that an agent spawned; not beating yet."""
    return Pulse(Beacon.attach(os.environ.get(ENV_BEACON)))


def sample_ddp(model: DistributedDataParallel) -> None:
    """Let DDP time its passes often enough."""
    model._set_ddp_runtime_logging_sample_rate(_SAMPLE_EVERY)


def _ddp_wait(model: DistributedDataParallel) -> int:
    """Nanoseconds from the last gradient to the end of the last reduction, in the last sampled pass."""
    times = model._get_ddp_logging_data()
    return max(0, int(times.get("backward_comm_time_end", 0)) - int(times.get("backward_compute_time_end", 0)))
