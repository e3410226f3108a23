"""Preparing a migration's communicators in the background, while training goes on.

    BUILDING --connected--> READY --take()--> (owned by the runtime)
        |  \\--error------> FAILED
        \\--drop()--------> DROPPED     from any state; closes the store channel, which wakes a builder that waits for a peer

Each build has its own thread and its own store client: a shared client would let one wait block another. Members enter at very
different times (a joiner may first restart its script), which gloo's full-mesh connect does not bear; so everybody first passes a
barrier in the store. Groups are built in the order of their names everywhere, hence no circular waits.
On the way in, every member says of every group that may change that it has it, and in a crash whether it was idle, and at which count
(see ``groups``), as it was then: a drain may be carried out meanwhile. After the barrier all members read the same counts, so they agree
on what is rebuilt: what all members have, except what all of them had idle at one count; that is kept. A group that some member lacks
(transient, or only rehearsed) is left out.
May not know: steps, votes, when the result is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from tmrun import wire
from tmrun.worker import comm
from tmrun.worker.agent_store import AgentStore
from tmrun.worker.comm import Communicator, Kinds, Like
from tmrun.worker.groups import Group

CONTROL = "tmrun.control"
"""Name under which the control group is reported and bootstrapped."""
_ENTER_TIMEOUT = timedelta(hours=1)


class Role(Enum):
    """What this process is in a migration."""

    STAYER = "stayer"
    LEAVER = "leaver"
    JOINER = "joiner"


class Status(Enum):
    """Where a build is; see the module's text."""

    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Plan:
    """What is to be built, fixed when the build starts."""

    prepare: wire.Prepare
    role: Role
    world: int
    groups: tuple[Group, ...]
    device: torch.device = comm.ANY.device
    peers: Collection[int] = ()
    """Ranks with which this one has wires."""

    def id_of(self, name: str) -> str:
        """Bootstrap id of a communicator of this migration."""
        return f"m{self.prepare.migration}/{name}"

    @property
    def direct_kinds(self) -> Kinds:
        """With what a leaver and its joiner reach each other's devices: what all ranks have for theirs, if that only queues."""
        here = self.device.type
        world: Kinds = next((group.kinds for group in self.groups if len(group.ranks) == self.world), {})
        return {here: world[here]} if here in world and world[here].QUEUED else {}


@dataclass
class Built:
    """The communicators of a finished build."""

    groups: dict[str, Communicator] = field(default_factory=dict)
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Groups of this rank that keep their connections though a rank was lost."""
    control: Communicator | None = None
    transfer: Communicator | None = None
    direct: Communicator | None = None
    """Beside ``transfer``, for tensors on a device."""


class Build:
    """One migration's builder thread and what it made."""

    def __init__(self, plan: Plan, open_store: Callable[[], AgentStore], changed: Callable[[Build], None]) -> None:
        self.plan = plan
        self.status = Status.BUILDING
        self.reason = ""
        self.built = Built()
        self._open_store = open_store
        self._changed = changed
        self._store: AgentStore | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"tmrun-build-{plan.prepare.migration}", daemon=True)

    def start(self) -> Build:
        """Begin."""
        self._thread.start()
        return self

    def drop(self) -> None:
        """Stop, and release what was built, without waiting for it."""
        with self._lock:
            was, self.status = self.status, Status.DROPPED
            if self._store is not None:
                self._store.close()
        if was is not Status.BUILDING:
            threading.Thread(target=self._release, name="tmrun-release", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._lock:
                if self.status is Status.DROPPED:
                    return
                self._store = self._open_store()
            self._connect(self._store)
            self._finish(Status.READY, "")
        except Exception as error:  # whatever it was: the migration cannot go on
            self._finish(Status.FAILED, f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            if self._store is not None:
                self._store.dispose()

    def _finish(self, status: Status, reason: str) -> None:
        with self._lock:
            dropped = self.status is Status.DROPPED
            if not dropped:
                self.status, self.reason = status, reason
        if dropped or status is Status.FAILED:
            self._release()
        if not dropped:
            self._changed(self)

    def _release(self) -> None:
        built, self.built = self.built, Built()  # destroying a gloo backend joins its threads, some milliseconds each
        made = [*built.groups.values(), *(each for each in (built.control, built.transfer, built.direct) if each is not None)]
        comm.vacate([each.connection for each in made])

    def _connect(self, store: AgentStore) -> None:
        if self.plan.role is Role.LEAVER:
            self._connect_transfer(store, 0)
            return
        candidates = self._candidates()
        idle = {group.name: self._idle_at(group) for group in candidates}
        self._enter(store, candidates, idle)
        rank = self.plan.prepare.rank
        for group in self._to_build(store, candidates, idle):
            like = Like(self.plan.device, group.options, self._is_pairwise(store, group), partial(self._lasting, group.name))
            self.built.groups[group.name] = self._build(store, group.kinds, group.name, group.rank, len(group.ranks), group.timeout, like)
            self.built.ranks[group.name] = group.ranks
        self.built.control = comm.control(PrefixStore(self.plan.id_of(CONTROL), store), rank, self.plan.world, self.plan.peers)
        self.built.ranks[CONTROL] = tuple(range(self.plan.world))
        if self.plan.role is Role.JOINER and self.plan.prepare.kind is wire.Kind.DRAIN:
            self._connect_transfer(store, 1)

    def _candidates(self) -> list[Group]:
        """In a drain, groups that contain a leaver; in a crash all, if only to find out which were idle."""
        moved, drain = set(self.plan.prepare.ranks), self.plan.prepare.kind is wire.Kind.DRAIN
        return [g for g in sorted(self.plan.groups, key=lambda g: g.name) if not (drain and moved.isdisjoint(g.ranks))]

    def _enter(self, store: AgentStore, candidates: Sequence[Group], idle: Mapping[str, str | None]) -> None:
        for group in candidates:
            store.add(self._has(group), 1)
            if group.switch.pairwise:
                store.add(self._pairwise(group), 1)
            if (idle_at := idle[group.name]) is not None:
                store.add(idle_at, 1)
        go = self.plan.id_of("go")
        if store.add(self.plan.id_of("entered"), 1) == self.plan.world:
            store.set(go, "1")
        store.wait([go], _ENTER_TIMEOUT)

    def _to_build(self, store: AgentStore, candidates: Sequence[Group], idle: Mapping[str, str | None]) -> list[Group]:
        found = []
        for group in candidates:
            idle_at = idle[group.name]
            if idle_at is not None and store.add(idle_at, 0) == len(group.ranks):
                self.built.kept[group.name] = group.ranks
            elif store.add(self._has(group), 0) == len(group.ranks):
                found.append(group)
        return found

    def _has(self, group: Group) -> str:
        return self.plan.id_of(f"has/{group.name}/{_text(group.ranks)}")

    def _pairwise(self, group: Group) -> str:
        return self.plan.id_of(f"pairwise/{group.name}/{_text(group.ranks)}")

    def _is_pairwise(self, store: AgentStore, group: Group) -> bool:
        """The same on all members: one that says so is enough. Only asked where it matters."""
        queued = any(kind.QUEUED for kind in group.kinds.values())
        return queued and store.add(self._pairwise(group), 0) > 0

    def _idle_at(self, group: Group) -> str | None:
        """Key under which members meet that were idle on the same communicator, at the same count; None for one that was not, or cannot
        tell."""
        at = None if self.plan.prepare.kind is wire.Kind.DRAIN or self.plan.role is Role.JOINER else group.idle_at
        return None if at is None else self.plan.id_of(f"idle/{group.name}/{_text(group.ranks)}/{_text(at)}")

    def _connect_transfer(self, store: AgentStore, place: int) -> None:
        name = f"x{self.plan.prepare.rank}"
        if place == 0:
            store.wait([self.plan.id_of(f"{name}/go")], _ENTER_TIMEOUT)
        else:
            store.set(self.plan.id_of(f"{name}/go"), "1")
        self.built.transfer = self._build(store, comm.CONTROL, name, place, 2)
        if kinds := self.plan.direct_kinds:
            self.built.direct = self._build(store, kinds, f"{name}d", place, 2, like=Like(self.plan.device))

    def _lasting(self, name: str) -> comm.LastingStore:
        client = self._open_store()
        return client, PrefixStore(self.plan.id_of(name), client)

    def _build(
        self, store: Store, kinds: Kinds, name: str, rank: int, size: int, timeout: timedelta = comm.LONG, like: Like = comm.ANY
    ) -> Communicator:
        return comm.build(kinds, PrefixStore(self.plan.id_of(name), store), rank, size, timeout, like)


def _text(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))
