"""The pure-Python switch: every exchange registers the new backend under a fresh type.

``pg._register_backend(device, type, backend)`` takes a backend only if ``type`` is new to that group (for a known type it silently
re-selects the old object), types are one byte, and a registered backend is never released. So after 240 exchanges of a group ``room``
is 0 and a migration has to be refused, and each leaves an idle backend behind: with gloo ``THREADS_LEFT`` threads, ``FILES_LEFT``
descriptors and one a connection. The poison backend is one object a group and is re-selected by its type. Errors are not hidden from a
step's body, and nothing is known about what is in flight. May not know: steps, migrations, the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from tmrun.core.errors import WorkerError
from tmrun.worker import comm
from tmrun.worker.comm import Communicator, Kinds
from tmrun.worker.groups import select, take_place

_Type = dist.ProcessGroup.BackendType
_POISON_TYPE = 15
_FIRST_TYPE = 16
_LAST_TYPE = 255
THREADS_LEFT = 3
"""Threads that every exchange of a gloo group leaves behind."""
FILES_LEFT = 4
"""Descriptors that every exchange of a gloo group leaves behind, beside one a peer."""


class SlotSwitch:
    """One group's; see the module's text for its limits."""

    def __init__(self, pg: dist.ProcessGroup, kinds: Kinds, *, fake: bool) -> None:
        self._pg, self._kinds, self._fake = pg, kinds, fake
        self._parts = [devices for _, devices in comm.parts_of(kinds)]
        self._next = _FIRST_TYPE
        self._poison: FakeProcessGroup | None = None
        self._current: list[Any] = [] if fake else [pg._get_backend(torch.device(devices[0])) for devices in self._parts]

    @property
    def room(self) -> int:
        """How many more exchanges are possible."""
        return (_LAST_TYPE + 1 - self._next) // len(self._parts)

    def install(self, backends: Mapping[str, Any]) -> None:
        """Use these, by device type, from the next collective on."""
        new = [backends[devices[0]] for devices in self._parts]
        if self._fake:
            take_place(self._pg, self._kinds, backends)
            self._fake, self._current = False, new
            return
        if not self.room:
            done = (self._next - _FIRST_TYPE) // len(self._parts)
            raise WorkerError(f"process group {self._pg.group_name} was switched {done} times; restart the job")
        for devices, backend in zip(self._parts, new, strict=True):
            select(self._pg, devices, _Type(self._next), backend)
            self._next += 1
        self._use(new)

    def poison(self) -> None:
        """Make every further collective a no-op that succeeds, until the next ``install``."""
        if self._poison is None:
            self._poison = FakeProcessGroup._create_internal(self._pg.rank(), self._pg.size())
        for devices in self._parts:
            select(self._pg, devices, _Type(_POISON_TYPE), self._poison)
        self._use([self._poison] * len(self._parts))

    def close(self, reason: str) -> None:
        """Python-level calls are refused by ``Groups``; the C++ object keeps its dead connections, which fail."""

    def release(self) -> None:
        """Nothing can be freed."""

    def complete(self) -> None:
        """Nothing is counted."""

    @property
    def idle(self) -> tuple[int, ...] | None:
        """Not known."""
        return None

    @property
    def settled(self) -> bool:
        """Not known, so nobody has to wait."""
        return True

    @property
    def pairwise(self) -> bool:
        """Not known."""
        return True

    @property
    def started(self) -> int:
        """By the backends' own count; a stand-in has none."""
        return sum(int(b._get_sequence_number_for_group()) for b in self._current if not isinstance(b, FakeProcessGroup))

    @property
    def called(self) -> int:
        """The same, for want of anything better."""
        return self.started

    def _use(self, backends: list[Any]) -> None:
        self._current = backends
        for devices, backend in zip(self._parts, backends, strict=True):
            selected = self._pg._get_backend(torch.device(devices[0]))
            assert selected is backend, (self._pg.group_name, devices, selected)


class SlotSwitching:
    """This process's way of switching."""

    name = "slot"
    failing = False
    first_error = ""
    hidden = 0
    needs_stand_in = True

    def new(self, pg: dist.ProcessGroup, kinds: Kinds, *, fake: bool) -> SlotSwitch:
        """A group's switch."""
        return SlotSwitch(pg, kinds, fake=fake)

    def own(self, communicator: Communicator) -> Communicator:
        """As it is; who waits in it cannot be let go."""
        return communicator

    def rehearse(self, on: bool) -> None:
        """Rehearsed groups are made fake."""

    def arm(self, on: bool) -> None:
        """Errors are exceptions, in a step and outside."""

    def fail(self, on: bool) -> None:
        """Cut connections are enough."""

    def abandon(self) -> None:
        """Nobody can be woken from here; ``stuck`` is what remains."""
