"""The pure-Python switch: every exchange registers the new backend under a fresh type.

``pg._register_backend(device, type, backend)`` takes a backend only if ``type`` is new to that group (for a known type it silently
re-selects the old object), types are one byte, and a registered backend is never released. So after 240 exchanges of a group ``room``
is 0 and a migration has to be refused, and each leaves an idle backend behind: ``THREADS_LEFT`` threads, ``FILES_LEFT`` descriptors and
one a connection. The poison backend is one object a group and is re-selected by its type. Errors are not hidden from a step's body,
and nothing is known about what is in flight. May not know: steps, migrations, the agent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from tmrun.core.errors import WorkerError
from tmrun.worker.groups import select

_Type = dist.ProcessGroup.BackendType
_POISON_TYPE = 15
_FIRST_TYPE = 16
_LAST_TYPE = 255
THREADS_LEFT = 3
"""Threads that every exchange of a group leaves behind."""
FILES_LEFT = 4
"""Descriptors that every exchange of a group leaves behind, beside one a peer."""


class SlotSwitch:
    """One group's; see the module's text for its limits."""

    def __init__(self, pg: dist.ProcessGroup, *, fake: bool) -> None:
        self._pg = pg
        self._fake = fake
        self._next = _FIRST_TYPE
        self._poison: FakeProcessGroup | None = None
        self._current: Any = None if fake else pg._get_backend(torch.device("cpu"))

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

    def close(self, reason: str) -> None:
        """Python-level calls are refused by ``Groups``; the C++ object keeps its dead connections, which fail."""

    def release(self) -> None:
        """Nothing can be freed."""

    @property
    def idle(self) -> int | None:
        """Not known."""
        return None

    @property
    def settled(self) -> bool:
        """Not known, so nobody has to wait."""
        return True

    @property
    def started(self) -> int:
        """By the backend's own count; a stand-in has none."""
        current = self._current
        return 0 if current is None or isinstance(current, FakeProcessGroup) else int(current._get_sequence_number_for_group())

    def _select(self, kind: dist.ProcessGroup.BackendType, backend: Any) -> None:
        select(self._pg, kind, backend)
        self._current = backend
        selected = self._pg._get_backend(torch.device("cpu"))
        assert selected is backend, (self._pg.group_name, kind, selected)


class SlotSwitching:
    """This process's way of switching."""

    name = "slot"
    failing = False
    first_error = ""
    needs_stand_in = True

    def new(self, pg: dist.ProcessGroup, *, fake: bool) -> SlotSwitch:
        """A group's switch."""
        return SlotSwitch(pg, fake=fake)

    def rehearse(self, on: bool) -> None:
        """Rehearsed groups are made fake."""

    def arm(self, on: bool) -> None:
        """Errors are exceptions, in a step and outside."""

    def fail(self, on: bool) -> None:
        """Cut connections are enough."""

    def abandon(self) -> None:
        """Nobody can be woken from here; ``stuck`` is what remains."""
