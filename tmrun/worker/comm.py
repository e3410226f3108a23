"""What the rest of the worker asks of a backend. Each backend is one module with the shape of ``Kind`` (``comm_gloo``).

A *communicator* is torch's backend object plus its *connection*, the handle by which it is woken from another thread. The two are kept
apart: whoever may have to abort holds the connection only, so that a replaced backend can be freed.
The control and transfer groups of a migration are always ``CONTROL``'s, on the CPU, whatever the script uses.
May not know: migrations, torch's process group objects.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from tmrun.core.errors import WorkerError
from tmrun.worker import comm_gloo

LONG = timedelta(days=1)
"""For waits that a peer may take any time to end; if it is lost, the connection is cut."""


class Backend(Protocol):
    """What we call of a backend ourselves; torch's annotations leave these methods out."""

    def size(self) -> int:
        """Number of members."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Send one tensor."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Receive one tensor; it may have more room than what was sent."""

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work: ...


class Connection(Protocol):
    """The handle of a communicator."""

    @property
    def certain(self) -> bool:
        """Whether an abort can touch nothing else."""

    def abort(self) -> int:
        """Wake threads that are blocked in the communicator; it is unusable from then on. Returns how many links were cut."""

    def close(self) -> int:
        """Make sure that any further use fails; nobody should be using it any more. Returns how many links were cut."""

    def quiet(self) -> bool:
        """After ``abort``, takes a moment: whether no thread of it moves any more. What has not ended then never will."""


@dataclass(eq=False)
class Communicator:
    """A backend and its connection."""

    backend: Backend
    connection: Connection


class Making(Protocol):
    """The construction of a process group by user code."""

    def abort(self) -> int:
        """Wake it, from another thread."""

    @property
    def made(self) -> Connection:
        """What it opened, once it is over."""


class Kind(Protocol):
    """A backend's module."""

    NAME: str
    """As torch calls it."""
    SIGNS: tuple[str, ...]
    """What the text of an error contains that belongs to a lost connection."""

    def build(self, store: Store, rank: int, size: int, timeout: timedelta) -> tuple[Any, Connection]:
        """Connect to all peers, while training goes on. Raises RuntimeError when one does not come.

        ``timeout`` is that of later collectives; peers have ``comm_gloo.BUILD_TIMEOUT`` to come.
        """

    def making(self) -> AbstractContextManager[Making]:
        """Around the construction of a process group."""


CONTROL: Kind = comm_gloo
_KINDS: dict[str, Kind] = {kind.NAME: kind for kind in (CONTROL,)}
SIGNS = tuple(sign for kind in _KINDS.values() for sign in kind.SIGNS)


def kind_of(group: str, backend: Any) -> Kind:
    """The kind behind torch's name of a backend (``gloo``, ``cpu:gloo,cuda:nccl``). Raises WorkerError naming the group."""
    names = set(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values())
    if len(names) != 1 or not names <= _KINDS.keys():
        known, used = ", ".join(_KINDS), ", ".join(sorted(map(str, names)))
        raise WorkerError(f"process group {group} uses {used}; this version of tmrun can switch {known} only")
    return _KINDS[names.pop()]


def build(kind: Kind, store: Store, rank: int, size: int, timeout: timedelta) -> Communicator:
    """A new communicator."""
    return Communicator(*kind.build(store, rank, size, timeout))
