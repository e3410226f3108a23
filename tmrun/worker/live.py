"""The live communication of a process: its groups, its control group, and the lock under which they change.

The main thread switches; the link thread cuts connections when a failure is reported, so that a blocked main thread comes back at once.
``lock`` makes the two atomic to each other: whatever is installed after a failure was reported is cut at once too.
May not know: steps, votes, what a migration is for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from tmrun.core.errors import WorkerError
from tmrun.worker import comm, device
from tmrun.worker.agent_store import AgentStore, SwitchStore
from tmrun.worker.board import Board, Pending
from tmrun.worker.build import CONTROL, Built
from tmrun.worker.comm import Backend, Communicator, Connection, Making
from tmrun.worker.device import Device
from tmrun.worker.groups import Group, Groups, Switching, choose
from tmrun.worker.identity import Identity
from tmrun.worker.link import fence

_RETIRE_S = float(os.environ.get("TMRUN_TEST_RETIRE_S", "1"))
"""How long after a switch the replaced connections are shut and freed, off the critical path."""
_SETTLE_S = 5.0


@dataclass(frozen=True)
class Made:
    """A process group that user code made, and how: ``backend`` as torch names it, ``options`` for it."""

    name: str
    pg: dist.ProcessGroup
    ranks: tuple[int, ...]
    backend: Any
    timeout: timedelta
    options: Any = None


@dataclass
class Live:
    """See the module's text."""

    who: Identity
    switching: Switching = field(default_factory=choose)
    groups: Groups = field(default_factory=Groups)
    control: Communicator | None = None
    base: SwitchStore | None = None
    device: Device = field(default_factory=device.Cpu)
    """Set when the loop begins (``device.of``)."""
    direct: dict[str, Backend] = field(default_factory=dict)
    """After a failure's switch, until state has moved: what all ranks now have for devices that only queue (``transfer``)."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _anchors: list[AgentStore] = field(default_factory=list)
    _making: Making | None = None
    _lost: bool = False
    _synchronizing: bool = False
    _failures: int = 0

    def clear(self) -> None:
        """Forget everything (soft restart)."""
        with self.lock:
            self.groups.clear()
            self.control = self.base = None

    # -- stores ---------------------------------------------------------------------------------------------------------------------
    def new_store(self) -> AgentStore:
        """A client of the job's store with its own connection."""
        return AgentStore(self.who.socket, self.who.local_rank)

    def base_store(self, *, private: bool) -> SwitchStore:
        """The store for init_process_group."""
        self.base = SwitchStore(HashStore() if private else self._job_store())
        return self.base

    def publish(self) -> None:
        """The private store becomes the job's."""
        assert self.base is not None
        self.base.inner = self._job_store()

    def _job_store(self) -> Store:
        store = self.new_store()
        self._anchors.append(store)  # C++ alone would lose the Python overrides
        return PrefixStore(f"base/{self.who.generation}", store)

    def scoped(self, store: Any) -> Any:
        """The part of a store in which a group is made. A step that is run again makes its groups again, under the same names."""
        return PrefixStore(f"epoch{self.who.epoch}", store) if isinstance(store, Store) else store

    # -- groups ---------------------------------------------------------------------------------------------------------------------
    def connect_control(self, peers: Collection[int]) -> None:
        """Build the first control group, with wires to ``peers``."""
        store = PrefixStore(CONTROL, self._job_store())
        self.control = self.switching.own(comm.control(store, self.who.rank, self.who.world, peers))

    @contextlib.contextmanager
    def making(self, name: str, backend: Any) -> Iterator[Making]:
        """User code makes a process group; ``abort`` wakes it too."""
        if self.failing or self._lost:
            raise dist.DistBackendError("Connection closed: a rank was lost")
        with comm.making(comm.kinds_of(name, backend)) as making:
            self._making = making
            try:
                yield making
            finally:
                self._making = None

    def add(self, made: Made, making: Making, *, fake: bool) -> None:
        """User code made a process group."""
        pg, kinds = made.pg, comm.kinds_of(made.name, made.backend)
        connection = comm.joined(()) if fake else making.connection(lambda device: pg._get_backend(torch.device(device)))
        with self.lock:
            self.switching.rehearse(fake)
            switch = self.switching.new(pg, kinds, fake=fake)
            self.groups.add(Group(made.name, pg, made.ranks, made.timeout, switch, kinds, connection, made.options))

    def remove(self, pg: dist.ProcessGroup | None) -> None:
        """User code destroys a process group; None: all of them."""
        with self.lock:
            if pg is None:
                self.groups.clear()
            else:
                self.groups.forget(pg)

    def undo_groups(self, lasting: Callable[[str], bool], when: str) -> None:
        """Destroy all groups but the ``lasting`` ones: what made them is undone, and makes them again under the same names."""
        for group in [each for each in self.groups if not lasting(each.name)]:
            dist.destroy_process_group(group.pg)
            self.groups.closed[group.pg] = (
                f"process group {group.name} of ranks {list(group.ranks)} was made in {when}, which was undone; "
                "make groups before run.steps, or in every step that uses them"
            )

    def set_timeout(self, pg: dist.ProcessGroup, timeout: timedelta) -> bool:
        """A new default timeout, which later communicators keep. Whether the group is ours."""
        group = self.groups.of(pg)
        if group is not None:
            group.timeout = timeout
            for _, devices in comm.parts_of(group.kinds):
                pg._get_backend(torch.device(devices[0]))._set_default_timeout(timeout)
        return group is not None

    # -- failing --------------------------------------------------------------------------------------------------------------------
    @property
    def failing(self) -> bool:
        """Whether collectives inside a step became no-ops by themselves."""
        return self.switching.failing

    @property
    def lost(self) -> bool:
        """Whether connections were cut since the last switch: collectives since then may have been skipped, or ended with garbage."""
        return self._lost

    @property
    def hidden_error(self) -> str:
        """The first error that was hidden from the script."""
        return self.switching.first_error

    @property
    def hidden(self) -> int:
        """How many operations were skipped in steps, or had errors hidden, as far as is known. Never falls."""
        return self.switching.hidden

    @property
    def queues(self) -> Collection[str]:
        """Types of devices on which some group's collectives are only queued when they return."""
        return {device for group in self.groups for device, kind in group.kinds.items() if kind.QUEUED}

    @property
    def started(self) -> int:
        """Collectives started, in all groups."""
        return sum(group.switch.started for group in self.groups)

    @property
    def called(self) -> int:
        """How often all groups were told to communicate."""
        return sum(group.switch.called for group in self.groups)

    def arm(self, on: bool) -> None:
        """A step's block begins or ends."""
        self.switching.arm(on)

    def poison(self) -> None:
        """Collectives become no-ops until the next ``install``."""
        with self.lock:
            self.groups.poison()

    def abort(self) -> None:
        """A rank was lost: wake whoever is blocked in any group, the control group and groups being made included."""
        with self.lock:
            self._lost = True
            self.switching.fail(True)  # first: what the groups count is frozen from here on
            self.groups.abort()
            if self.control is not None:
                self.control.connection.abort()
            if self._making is not None:
                self._making.abort()
            if self._making is not None or any(group.connection.on_device for group in self.groups):
                self._reopen_store()  # NCCL meets in it, in a group's first collective
            self._failures += 1
            threading.Thread(target=self._give_up, args=(self._failures,), name="tmrun-give-up", daemon=True).start()

    def _give_up(self, failure: int) -> None:
        """Some operations are never told that their connection was cut. When the cut communicators do not move any more, say so."""
        with self.lock:
            cut = [group.connection for group in self.groups if group.cut]
            if self.control is not None:
                cut.append(self.control.connection)
        for connection in cut:
            while not connection.quiet():
                if self._failures != failure or not self._lost:
                    return
        with self.lock:
            if self._failures == failure and self._lost:
                self.switching.abandon()

    def _reopen_store(self) -> None:
        if self.base is None:
            return
        blocked, self._anchors = self._anchors, []
        self.base.inner = self._job_store()
        for store in blocked:
            store.close()

    # -- the device -----------------------------------------------------------------------------------------------------------------
    def complete(self) -> None:
        """Wait until everything queued on the device has run; what was aborted ends too, and then it is known that a rank was lost.

        Before a vote, and before state is read or put back. Raises RuntimeError when something of it failed; ends the process when the
        device does not work any more for it, which nothing in this process can mend.
        """
        self._synchronizing = True
        try:
            self.device.synchronize()
        except RuntimeError as error:
            if device.is_sticky(self.device):
                fence(f"rank {self.who.rank} has lost its device: {str(error).splitlines()[0]}")
            raise
        finally:
            self._synchronizing = False
        with self.lock:
            if not self._lost:
                self.groups.complete()

    @property
    def waits_for_device(self) -> bool:
        """Whether the main thread waits for what was queued, and may use its CPU for it."""
        return self._synchronizing or bool(self.direct)

    # -- switching ------------------------------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Before a drain's stop: wait for asynchronous collectives that the script has not waited for; their peers may be leaving."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline and not all(group.switch.settled for group in self.groups):
            time.sleep(0.001)

    def install(self, pending: Pending, board: Board) -> float:
        """Switch to what was built for a committed migration; no communication. Returns seconds.

        On a device, first everything queued ends, with garbage after an abort; then groups are switched; then what was replaced gives its
        memory back. Only after that anybody can use a new communicator, which takes its own.
        """
        began = time.perf_counter()
        self._come_to_rest()
        assert pending.build is not None
        assert pending.commit is not None
        built = pending.build.built
        for name in built.ranks:
            wanted, have = pending.commit.comm.get(name), pending.build.plan.id_of(name)
            if wanted != have:
                raise WorkerError(f"group {name} was prepared as {have}, but the committed map says {wanted}")
        with self.lock:
            old, retired = self.groups.install(built.groups, pending.id), self.control
            assert built.control is not None
            self.control, built.control = self.switching.own(built.control), None
            self.direct = self._direct(built) if pending.failure and not pending.commit.rollback else {}
            self._close_lost(built, pending)
            self.switching.rehearse(False)
            self.switching.fail(False)
            self._lost = False
            board.done(pending)
            if board.failure is not None:  # reported meanwhile: what was just installed has lost a peer already
                self.abort()
        comm.vacate(old)
        self.who.epoch = pending.commit.epoch
        built.groups = {}  # else these references would keep the communicators alive, until a garbage collection
        threading.Thread(target=self._retire, args=(old, retired), name="tmrun-release", daemon=True).start()
        return time.perf_counter() - began

    def _direct(self, built: Built) -> dict[str, Backend]:
        for group in self.groups:
            new = built.groups.get(group.name)
            if new is not None and len(group.ranks) == self.who.world:
                found = {device: backend for device, backend in new.backends.items() if group.kinds[device].QUEUED}
                group.moving = bool(found)
                return found
        return {}

    def state_moved(self) -> None:
        """Nobody needs ``direct`` any more: from here on the switch counts all that goes over that communicator."""
        with self.lock:
            self.direct = {}
            for group in self.groups:
                group.moving = False

    def _come_to_rest(self) -> None:
        """No kernel of an aborted communicator, and nothing queued behind it, may run once state is put back."""
        with self.lock:
            aborted = [group.connection for group in self.groups if group.cut and group.connection.on_device]
        comm.vacate(aborted)
        with contextlib.suppress(RuntimeError):  # of what was aborted; it is over with that
            self.complete()

    def fates(self, pending: Pending) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the groups that a migration gave new connections, and of those that keep theirs."""
        assert pending.build is not None
        built = pending.build.built
        names = [group.name for group in self.groups]
        kept = tuple(group.name for group in self.groups if _stays(group, built, pending))
        return tuple(name for name in names if name in built.ranks), kept

    def _close_lost(self, built: Built, pending: Pending) -> None:
        moved = set(pending.prepare.ranks)
        for group in self.groups:
            if not _stays(group, built, pending) and group.name not in built.groups:
                who = f"contains {_ranks(moved.intersection(group.ranks))}, which moved" if moved & set(group.ranks) else "lost its members"
                self.groups.close(
                    group,
                    f"process group {group.name} of ranks {list(group.ranks)} {who}, and not all of its members have it; "
                    "make groups before run.steps, or make and destroy them within one step",
                )

    def _retire(self, old: list[Connection], control: Communicator | None) -> None:
        """Shut what nobody should use any more, so that a forgotten reference fails instead of hanging, and free it."""
        time.sleep(_RETIRE_S)
        if control is not None:
            old.append(control.connection)
        while old:  # one after the other let go of here: what is freed with the last reference of Python's would hold the GIL for it
            _shut(old.pop())
        with self.lock:
            groups = list(self.groups)
        for group in groups:
            group.switch.release()


def _stays(group: Group, built: Built, pending: Pending) -> bool:
    """Whether a group keeps its connections."""
    return group.name in built.kept if pending.failure else set(pending.prepare.ranks).isdisjoint(group.ranks)


def _shut(connection: Connection) -> None:
    if connection.certain:
        connection.close()


def _ranks(ranks: set[int]) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"ranks {sorted(ranks)}"
