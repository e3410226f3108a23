"""What the rest of the worker asks of a backend. Each backend is one module that has something of the shape of ``Kind`` (``comm_gloo``).

A *communicator* is what a process group communicates with: one of torch's backend objects for each kind of device (``cpu:gloo,cuda:nccl``
has two, ``gloo`` serves both with one), and its *connection*, the handle by which it is woken from another thread. The two are kept
apart: whoever may have to abort holds the connection only, so that a replaced backend can be freed.
The control and transfer groups of a migration are always ``CONTROL``'s, on the CPU, whatever the script uses.
May not know: migrations, torch's process group objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from tmrun.core.errors import WorkerError
from tmrun.worker import comm_gloo, comm_nccl, wires
from tmrun.worker.wires import Wires

_CPU = torch.device("cpu")
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

    @property
    def on_device(self) -> bool:
        """Whether it takes a device's memory, which ``vacate`` gives back."""

    def abort(self) -> int:
        """Wake threads that are blocked in the communicator; it is unusable from then on. Returns how many links were cut."""

    def close(self) -> int:
        """Make sure that any further use fails; nobody should be using it any more. Returns how many links were cut."""

    def quiet(self) -> bool:
        """After ``abort``, takes a moment: whether no thread of it moves any more. What has not ended then never will."""

    def vacate(self) -> None:
        """Give a device's memory back, for the next communicator; nobody uses this one any more. Returns when it is done."""


class Making(Protocol):
    """The construction of a process group by user code."""

    def abort(self) -> int:
        """Wake it, from another thread."""

    def connection(self, backend: Any) -> Connection:
        """The handle of what it made, once it is over."""


class Client(Protocol):
    """A client of the job's store."""

    def close(self) -> None:
        """Make it unusable; wakes a thread that waits in it."""

    def dispose(self) -> None:
        """Free it; no thread is inside a call."""


LastingStore = tuple[Client, Store]
"""A client, and the part of its store that is meant."""


@dataclass(frozen=True)
class Like:
    """What a communicator should be like, beside its members.

    ``device``: the one that this process works on. ``options``: what the script gave to torch for the group (``pg_options``).
    ``pairwise``: members send and receive on their own, outside a batch; where that needs connections of its own, it is not to be
    squeezed into the group's, which would order sends to different peers after each other. They are then made when they are needed,
    by way of a ``lasting`` store, which is the communicator's own from then on.
    """

    device: torch.device = _CPU
    options: Any = None
    pairwise: bool = False
    lasting: Callable[[], LastingStore] | None = None


ANY = Like()
"""Nothing special."""


class Kind(Protocol):
    """A backend's module, or an object of it."""

    NAME: str
    """As torch calls it."""
    TYPE: dist.ProcessGroup.BackendType
    """Under which torch registers it."""
    SIGNS: tuple[str, ...]
    """What the text of an error contains that belongs to a lost connection."""
    MISUSE: tuple[str, ...]
    """... that never does, though torch gives it the same type."""
    QUEUED: bool
    """Whether an operation that returned, or was waited for, may not have run yet: it is queued on a device."""

    def build(self, store: Store, rank: int, size: int, timeout: timedelta, like: Like) -> tuple[Any, Connection]:
        """Connect to all peers, while training goes on. Raises RuntimeError when one does not come.

        ``timeout`` is that of later collectives; peers have ``comm_gloo.BUILD_TIMEOUT`` to come.
        """

    def making(self) -> AbstractContextManager[Making]:
        """Around the construction of a process group."""

    def warm(self, like: Like) -> None:
        """Load what a process's first communicator loads."""


Kinds = Mapping[str, Kind]
"""Device type -> its kind."""
CONTROL: Kinds = {"cpu": comm_gloo}
_ALL: tuple[Kind, ...] = (comm_gloo, comm_nccl.NCCL, comm_nccl.NCCL2)
_KINDS = {kind.NAME: kind for kind in _ALL}
SIGNS = tuple(sorted({sign for kind in _KINDS.values() for sign in kind.SIGNS}))
MISUSE = tuple(sorted({sign for kind in _KINDS.values() for sign in kind.MISUSE}))


@dataclass(eq=False)
class Communicator:
    """Device type -> backend, and the connection of all of them, ``wires`` included."""

    backends: Mapping[str, Backend]
    connection: Connection
    wires: Wires | None = None
    """A control group's."""

    @property
    def backend(self) -> Backend:
        """The one for tensors on the CPU."""
        return self.backends["cpu"]


class Joined:
    """Several connections as one; of none, where there is nothing to wake."""

    def __init__(self, parts: Sequence[Connection] = ()) -> None:
        self.parts = tuple(parts)

    @property
    def certain(self) -> bool:
        """Of all."""
        return all(part.certain for part in self.parts)

    @property
    def on_device(self) -> bool:
        """Of any."""
        return any(part.on_device for part in self.parts)

    def abort(self) -> int:
        """All."""
        return sum(part.abort() for part in self.parts)

    def close(self) -> int:
        """All."""
        return sum(part.close() for part in self.parts)

    def quiet(self) -> bool:
        """All."""
        return all(part.quiet() for part in self.parts)

    def vacate(self) -> None:
        """Those on a device."""
        vacate(self.parts)


def joined(parts: Sequence[Connection]) -> Connection:
    """One connection for all."""
    return parts[0] if len(parts) == 1 else Joined(parts)


def vacate(connections: Iterable[Connection]) -> None:
    """Give the memory of all of these back, at the same time: what one waits for on the device may be queued behind another."""
    on_device = [each for each in connections if each.on_device]
    if on_device:
        with ThreadPoolExecutor(len(on_device), "tmrun-vacate") as pool:
            list(pool.map(lambda each: each.vacate(), on_device))


def kinds_of(group: str, backend: Any) -> dict[str, Kind]:
    """The kinds behind torch's name of a backend (``gloo``, ``cpu:gloo,cuda:nccl``). Raises WorkerError naming the group."""
    named = {device: str(name) for device, name in c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().items()}
    if not set(named.values()) <= _KINDS.keys():
        known, used = ", ".join(_KINDS), ", ".join(sorted(set(named.values())))
        raise WorkerError(f"process group {group} uses {used}; this version of tmrun can switch {known} only")
    return {device: _KINDS[name] for device, name in named.items()}


def parts_of(kinds: Kinds) -> list[tuple[Kind, tuple[str, ...]]]:
    """The different kinds, each with its devices; the same order everywhere."""
    by_name = {kind.NAME: kind for kind in kinds.values()}
    return [(by_name[name], tuple(d for d, kind in kinds.items() if kind is by_name[name])) for name in sorted(by_name)]


def build(kinds: Kinds, store: Store, rank: int, size: int, timeout: timedelta, like: Like = ANY) -> Communicator:
    """A new communicator."""
    backends: dict[str, Backend] = {}
    connections: list[Connection] = []
    for kind, devices in parts_of(kinds):
        try:
            backend, connection = kind.build(PrefixStore(kind.NAME, store), rank, size, timeout, like)
        except BaseException:
            joined(connections).close()
            raise
        backends.update(dict.fromkeys(devices, backend))
        connections.append(connection)
    return Communicator(backends, joined(connections))


def control(store: Store, rank: int, size: int, peers: Collection[int]) -> Communicator:
    """A control group, and this rank's wires to ``peers``."""
    made = build(CONTROL, store, rank, size, LONG)
    try:
        lines = wires.connect(store, rank, peers)
    except BaseException:
        made.connection.close()
        raise
    return Communicator(made.backends, joined([made.connection, lines]), lines)


class _Makings:
    def __init__(self, parts: Sequence[tuple[tuple[str, ...], Making]]) -> None:
        self._parts = parts

    def abort(self) -> int:
        return sum(making.abort() for _, making in self._parts)

    def connection(self, backend: Any) -> Connection:
        return joined([making.connection(backend(devices[0])) for devices, making in self._parts])


def warm(groups: Iterable[Kinds], device: torch.device, done: set[str]) -> None:
    """Do once in a process what the first communicators of such groups would else do when they are needed. ``done``: kept by its owner."""
    for kind in {kind.NAME: kind for kinds in groups for kind in kinds.values() if kind.NAME not in done}.values():
        kind.warm(Like(device))
        done.add(kind.NAME)


@contextmanager
def making(kinds: Kinds) -> Iterator[Making]:
    """Around the construction of a process group; ``connection`` wants a function: device type -> the group's backend for it."""
    with ExitStack() as stack:
        yield _Makings([(devices, stack.enter_context(kind.making())) for kind, devices in parts_of(kinds)])
