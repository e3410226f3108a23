"""The live communication of a process: its groups, its control group, and the lock under which they change.

The main thread switches; the link thread cuts connections when a failure is reported, so that a blocked main thread comes back at once.
``lock`` makes the two atomic to each other: whatever is installed after a failure was reported is cut at once too.
May not know: steps, votes, what a migration is for.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from tmrun.core.errors import WorkerError
from tmrun.worker import comm_gloo
from tmrun.worker.agent_store import AgentStore, SwitchStore
from tmrun.worker.board import Board, Pending
from tmrun.worker.build import CONTROL, CONTROL_TIMEOUT
from tmrun.worker.comm_gloo import Communicator, Sockets
from tmrun.worker.groups import Group, Groups, SlotSwitch
from tmrun.worker.identity import Identity


@dataclass
class Live:
    """See the module's text."""

    who: Identity
    groups: Groups = field(default_factory=Groups)
    control: Communicator | None = None
    base: SwitchStore | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    _retired: list[Communicator] = field(default_factory=list)
    _anchors: list[AgentStore] = field(default_factory=list)

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

    # -- groups ---------------------------------------------------------------------------------------------------------------------
    def connect_control(self) -> None:
        """Build the first control group."""
        store = PrefixStore(CONTROL, self._job_store())
        self.control = comm_gloo.build(store, self.who.rank, self.who.world, CONTROL_TIMEOUT)

    def add(
        self, name: str, pg: dist.ProcessGroup, ranks: tuple[int, ...], backend: Any, timeout: timedelta, sockets: Sockets, *, fake: bool
    ) -> None:
        """User code made a process group."""
        kinds = set(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values())
        if kinds != {"gloo"}:
            raise WorkerError(f"process group {name} uses {', '.join(sorted(map(str, kinds)))}; this version of tmrun can switch gloo only")
        with self.lock:
            self.groups.add(Group(name, pg, ranks, timeout, SlotSwitch(pg, fake=fake), sockets))

    def remove(self, pg: dist.ProcessGroup | None) -> None:
        """User code destroys a process group; None: all of them."""
        with self.lock:
            if pg is None:
                self.groups.clear()
            else:
                self.groups.forget(pg)

    def poison(self) -> None:
        """Collectives become no-ops until the next ``install``."""
        with self.lock:
            self.groups.poison()

    def abort(self) -> None:
        """Wake whoever is blocked in any group, the control group included."""
        with self.lock:
            self.groups.abort()
            if self.control is not None:
                self.control.abort()

    def install(self, pending: Pending, board: Board) -> float:
        """Switch to what was built for a committed migration; no communication. Returns seconds."""
        began = time.perf_counter()
        assert pending.build is not None
        assert pending.commit is not None
        built = pending.build.built
        for name in built.ranks:
            wanted, have = pending.commit.comm.get(name), pending.build.plan.id_of(name)
            if wanted != have:
                raise WorkerError(f"group {name} was prepared as {have}, but the committed map says {wanted}")
        with self.lock:
            if self.control is not None:
                self._retired.append(self.control)
            self.groups.install(built.groups)
            self.control = built.control
            board.done(pending)
            if board.failure is not None:  # reported meanwhile: what was just installed has lost a peer already
                self.abort()
        self.who.epoch = pending.commit.epoch
        return time.perf_counter() - began

    def release_retired(self) -> None:
        """Destroy old control groups; some milliseconds each, so not on the main thread."""
        self._retired.clear()
