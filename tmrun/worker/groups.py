"""Every process group that user code made, and how the communicator under it is exchanged.

Everything holds references to torch's ProcessGroup objects (DDP's reducer, DeviceMesh, functional collectives by name), so the object
stays and its *backend* changes: a ``Switch``. The only implementation here is ``SlotSwitch``, pure Python:
``pg._register_backend(device, type, backend)`` takes a backend only if ``type`` is new to that group (for a known type it silently
re-selects the old object), types are one byte, and a registered backend is never released. Hence every exchange takes a fresh
type: 240 exchanges a group, after which ``room`` is 0 and a migration has to be refused; each leaves an idle backend behind (three threads,
four descriptors and its connections). The poison backend is one object a group and is re-selected by its type.
May not know: migrations, steps, the agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from tmrun.core.errors import WorkerError
from tmrun.worker import comm_gloo
from tmrun.worker.comm_gloo import Communicator, Sockets

_Type = dist.ProcessGroup.BackendType
_POISON_TYPE = 15
_FIRST_TYPE = 16
_LAST_TYPE = 255


class Switch(Protocol):
    """How one group changes its communicator."""

    @property
    def room(self) -> int:
        """How many more exchanges are possible."""

    def install(self, backend: object) -> None:
        """Use this backend from the next collective on."""

    def poison(self) -> None:
        """Make every further collective a no-op that succeeds, until the next ``install``."""


class SlotSwitch:
    """Exchanges the backend through ``_register_backend``; see the module's text for its limits."""

    def __init__(self, pg: dist.ProcessGroup, *, fake: bool) -> None:
        self._pg = pg
        self._fake = fake
        self._next = _FIRST_TYPE
        self._poison: FakeProcessGroup | None = None

    @property
    def room(self) -> int:
        """How many more exchanges are possible."""
        return _LAST_TYPE + 1 - self._next

    def install(self, backend: object) -> None:
        """Use this backend from the next collective on."""
        if self._fake:  # a rehearsed group: its GLOO slot is still empty, and DDP looks there
            self._select(_Type.GLOO, backend)
            self._pg._set_default_backend(_Type.GLOO)
            self._fake = False
            return
        if not self.room:
            raise WorkerError(f"process group {self._pg.group_name} was switched {self._next - _FIRST_TYPE} times; restart the job")
        self._select(_Type(self._next), backend)
        self._next += 1

    def poison(self) -> None:
        """Make every further collective a no-op that succeeds, until the next ``install``."""
        if self._poison is None:
            self._poison = FakeProcessGroup._create_internal(self._pg.rank(), self._pg.size())
        self._select(_Type(_POISON_TYPE), self._poison)

    def _select(self, kind: dist.ProcessGroup.BackendType, backend: Any) -> None:
        name = self._pg.group_name
        for device in self._pg._device_types:
            if device.type in ("cpu", "cuda"):
                self._pg._register_backend(torch.device(device.type), kind, backend)
        self._pg._set_group_name(name)  # the name is read from the backend
        selected = self._pg._get_backend(torch.device("cpu"))
        assert selected is backend, (name, kind, selected)


@dataclass(eq=False)
class Group:
    """One process group: ``ranks`` are global ranks, ``rank`` is ours within it."""

    name: str
    pg: dist.ProcessGroup
    ranks: tuple[int, ...]
    timeout: timedelta
    switch: Switch
    sockets: Sockets = field(default_factory=frozenset)

    @property
    def rank(self) -> int:
        """Our rank within the group."""
        return self.pg.rank()


class Groups:
    """The live groups, by name. Not thread-safe: the runtime serialises changes and aborts with one lock."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self.poisoned = False

    def add(self, group: Group) -> None:
        """Start to manage a group."""
        self._groups = {group.name: group, **self._groups}  # never changed in place: the link thread reads it

    def forget(self, pg: dist.ProcessGroup) -> None:
        """User code destroyed this group."""
        self._groups = {n: g for n, g in self._groups.items() if g.pg is not pg}

    def clear(self) -> None:
        """Forget everything (soft restart, or the default group was destroyed)."""
        self._groups = {}
        self.poisoned = False

    def __iter__(self) -> Iterator[Group]:
        return iter([self._groups[name] for name in sorted(self._groups)])

    def install(self, communicators: Mapping[str, Communicator]) -> None:
        """Switch the named groups in place; no communication."""
        for name, communicator in communicators.items():
            group = self._groups.get(name)
            if group is not None:  # else: destroyed since it was prepared
                group.switch.install(communicator.backend)
                group.sockets = communicator.sockets
        self.poisoned = False

    def poison(self) -> None:
        """Let all collectives succeed without doing anything."""
        self.poisoned = True
        for group in self:
            group.switch.poison()

    def abort(self) -> int:
        """Wake whoever is blocked in any of the groups."""
        return sum(comm_gloo.abort(group.sockets) for group in self)

    def full(self) -> str | None:
        """Name of a group that cannot be switched any more."""
        return next((group.name for group in self if not group.switch.room), None)
