"""Every process group that user code made, and how the communicator under it is exchanged.

Everything holds references to torch's ProcessGroup objects (DDP's reducer, DeviceMesh, functional collectives by name), so the object
stays and its *backend* changes: a ``Switch``. Two implementations: ``shim`` (C++, forwards to an exchangeable backend) and ``slot``
(pure Python, for where there is no compiler). Every process of a job may use either.

Which groups change:
- a drain: those that contain a leaver. All others keep their connections.
- a crash: those that contain a lost rank, and those that may have been in use. A group keeps its connections only if *every* member
  shows, once its operations are frozen, that it is *idle at the same count*: it started n collectives since the communicator was made,
  all n completed without an error, no connection of it was cut, and it never sent or received point to point. Why that is safe: a gloo
  collective completes on a member when it has received all that it waits for and its sends are handed over; a message sent belongs to
  the n-th collective for some n, and its receiver, which completed the n-th too, has taken it. So nothing is under way, and tags (which
  count collectives) agree. Frozen: once a failure is reported, the shim starts nothing on any group (its check and its count are one
  critical section with the report), and counts are published after that. Two members with different counts (one completed a broadcast
  that the other never entered) rebuild. Point to point breaks the argument, for ranks take different parts in it.
  The slot cannot see completion: with it, a crash changes all groups. On a device, operations are only queued: there a group is idle if
  it started nothing since the device was last seen to have run everything, in the step before (``complete``).
- a group with a moved rank that the joiner does not have (transient, or made after the joiner rehearsed) is not rebuilt but *closed*:
  using it again is an error that says so.
May not know: migrations, steps, the agent.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tmrun.core.errors import WorkerError
from tmrun.worker import comm
from tmrun.worker.comm import Communicator, Connection, Kinds
from tmrun.worker.shim_cache import ENV_SWITCH


class Switch(Protocol):
    """How one group changes its communicator: all of its backends, each for its own devices."""

    @property
    def room(self) -> int:
        """How many more exchanges are possible."""

    def install(self, backends: Mapping[str, Any]) -> None:
        """Use these, by device type, from the next collective on."""

    def poison(self) -> None:
        """Make every further collective a no-op that succeeds, until the next ``install``."""

    def close(self, reason: str) -> None:
        """Refuse every further collective, until the next ``install``."""

    def release(self) -> None:
        """Free replaced communicators; takes milliseconds each."""

    def complete(self) -> None:
        """Everything that was queued on the device has run."""

    @property
    def idle(self) -> tuple[int, ...] | None:
        """How many collectives were started and completed on each backend; None if not provably all of them."""

    @property
    def settled(self) -> bool:
        """Whether no collective is under way, as far as is known."""

    @property
    def pairwise(self) -> bool:
        """Whether members have sent or received on their own over a queued backend, or may have."""

    @property
    def started(self) -> int:
        """How many collectives were started on this communicator; callable from any thread."""

    @property
    def called(self) -> int:
        """How often the group was told to communicate in any way since its last exchange, though nothing may have come of it."""


class Switching(Protocol):
    """How one process switches: makes the switches of its groups, and holds what they share."""

    name: str
    needs_stand_in: bool
    """Whether a rehearsing DDP needs a group of its own (``sandbox.isolate``)."""

    @property
    def failing(self) -> bool:
        """Whether collectives inside a step became no-ops, because a connection or a rank was lost."""

    @property
    def first_error(self) -> str:
        """The first error that was hidden from a step's body, if any."""

    @property
    def hidden(self) -> int:
        """How many operations of steps were skipped, or had their errors hidden; of this process, ever."""

    def own(self, communicator: Communicator) -> Communicator:
        """A communicator for tmrun's own use: nothing is hidden, and who waits in it can be let go (``abandon``)."""

    def new(self, pg: dist.ProcessGroup, kinds: Kinds, *, fake: bool) -> Switch:
        """The switch of a group."""

    def rehearse(self, on: bool) -> None:
        """Collectives have no peers."""

    def arm(self, on: bool) -> None:
        """A step's block is open: a lost connection may be hidden from it."""

    def fail(self, on: bool) -> None:
        """A rank was lost; or (False) the groups are whole again."""

    def abandon(self) -> None:
        """No operation that is still under way will ever end: let go whoever waits for one."""


def choose() -> Switching:
    """By the environment variable TMRUN_SWITCH: ``auto`` (the shim if the cache has it), ``shim``, ``slot``."""
    from tmrun.worker.shim import ShimSwitching, load
    from tmrun.worker.slot import SlotSwitching

    wanted = os.environ.get(ENV_SWITCH, "auto")
    if wanted not in ("auto", "shim", "slot"):
        raise WorkerError(f"{ENV_SWITCH}={wanted}: use auto, shim or slot")
    module = None if wanted == "slot" else load()
    if module is None and wanted == "shim":
        raise WorkerError(f"{ENV_SWITCH}=shim, but the C++ switch is not built; run `python -m tmrun.worker.shim` on this machine first")
    return SlotSwitching() if module is None else ShimSwitching(module)


def select(pg: dist.ProcessGroup, devices: Iterable[str], kind: dist.ProcessGroup.BackendType, backend: Any) -> None:
    """Register a backend for devices of the group; one that is registered under this type already is selected again."""
    name = pg.group_name
    for device in devices:
        pg._register_backend(torch.device(device), kind, backend)
    pg._set_group_name(name)  # the name is read from the backend


def take_place(pg: dist.ProcessGroup, kinds: Kinds, backends: Mapping[str, Any]) -> None:
    """Register the first real backends of a rehearsed group where torch would have: DDP and others look there. They stay for good."""
    for kind, devices in comm.parts_of(kinds):
        select(pg, devices, kind.TYPE, backends[devices[0]])
    types = [kind.TYPE for kind in kinds.values()]
    nccl = dist.ProcessGroup.BackendType.NCCL
    pg._set_default_backend(nccl if nccl in types else types[0])


@dataclass(eq=False)
class Group:
    """One process group: ``ranks`` are global ranks, ``rank`` is ours within it."""

    name: str
    pg: dist.ProcessGroup
    ranks: tuple[int, ...]
    timeout: timedelta
    switch: Switch
    kinds: Kinds
    connection: Connection
    options: Any = None
    """What the script gave to torch for it."""
    cut: bool = False
    """Whether its connection was cut."""
    moving: bool = False
    """Whether a state is moved over it, by its backend itself: its switch counts nothing of that."""
    since: int | None = 0
    """The migration that made its communicator, 0 for the script; None while it is being exchanged."""

    @property
    def rank(self) -> int:
        """Our rank within the group."""
        return self.pg.rank()

    @property
    def idle(self) -> tuple[int, ...] | None:
        """See ``Switch.idle``."""
        return self.switch.idle if self.connection.certain and not (self.cut or self.moving) else None

    @property
    def idle_at(self) -> tuple[int, ...] | None:
        """On which communicator it is idle, and at which counts: after a drain that only some have carried out, members use different
        ones. For any thread."""
        since, idle = self.since, self.idle
        return None if since is None or since != self.since or idle is None else (since, *idle)


class Groups:
    """The live groups, by name. Not thread-safe: ``Live`` serialises changes and aborts with one lock."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self.poisoned = False
        self.closed: MutableMapping[dist.ProcessGroup, str] = WeakKeyDictionary()
        """Groups that cannot be used any more, and why."""

    def add(self, group: Group) -> None:
        """Start to manage a group."""
        self._groups = {group.name: group, **self._groups}  # never changed in place: the link thread reads it

    def forget(self, pg: dist.ProcessGroup) -> None:
        """User code destroyed this group."""
        self._groups = {n: g for n, g in self._groups.items() if g.pg is not pg}
        self.closed.pop(pg, None)

    def clear(self) -> None:
        """Forget everything (soft restart, or the default group was destroyed)."""
        self._groups = {}
        self.poisoned = False
        self.closed.clear()

    @property
    def names(self) -> Collection[str]:
        """Of those that there are now; what is made later does not appear in it."""
        return self._groups.keys()

    def __iter__(self) -> Iterator[Group]:
        return iter([self._groups[name] for name in sorted(self._groups)])

    def of(self, pg: dist.ProcessGroup) -> Group | None:
        """The group around a ProcessGroup, if it is managed."""
        return next((g for g in self._groups.values() if g.pg is pg), None)

    def install(self, communicators: Mapping[str, Communicator], migration: int) -> list[Connection]:
        """Switch the named groups in place; no communication. Returns the connections that are not needed any more."""
        old: list[Connection] = []
        for name, communicator in communicators.items():
            group = self._groups.get(name)
            if group is not None:  # else: destroyed since it was prepared
                group.since = None
                group.switch.install(communicator.backends)
                old.append(group.connection)
                group.connection, group.cut, group.moving, group.since = communicator.connection, False, False, migration
                self.closed.pop(group.pg, None)
        self.poisoned = False
        return old

    def close(self, group: Group, reason: str) -> None:
        """Refuse every further use of a group."""
        self.closed[group.pg] = reason
        group.switch.close(reason)

    def refuse_closed(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise WorkerError if one of these arguments of a collective is a closed group."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, dist.ProcessGroup) and value in self.closed:
                raise WorkerError(self.closed[value])

    def poison(self) -> None:
        """Let all collectives succeed without doing anything."""
        self.poisoned = True
        for group in self:
            group.switch.poison()

    def abort(self) -> int:
        """Wake whoever is blocked in any of the groups; those that are provably idle are left alone."""
        count = 0
        for group in self:
            if group.idle is None:
                group.cut = True
                count += group.connection.abort()
        return count

    def complete(self) -> None:
        """Everything that was queued on the device has run."""
        for group in self:
            group.switch.complete()

    def release(self) -> None:
        """Free what was replaced."""
        for group in self:
            group.switch.release()

    def full(self) -> str | None:
        """Name of a group that cannot be switched any more."""
        return next((group.name for group in self if not group.switch.room), None)
