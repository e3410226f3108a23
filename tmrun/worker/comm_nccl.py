"""NCCL communicators that are initialised in the background and aborted from another thread. Written from torch's and NCCL's sources.

Prepared: torch's ``ProcessGroupNCCL`` on a part of the store that nobody has used, so with a unique id of its own, initialised by
``eager_connect_single_device`` in the builder's thread. It is a plain communicator: never split from another one, no shared resources, so
that aborting one touches no other. With NCCL_RUNTIME_CONNECT (``nccl_environment``) initialising opens no transports: they, and most of
the memory, come with the first collective. So the communicator that is replaced gives its memory back at the switch, before that
(``vacate``), and never are there two sets of buffers.

Initialised blocking, whatever the script asked for: torch does not tell when a nonblocking communicator is ready, other than by waiting
for it under the lock that ``abort`` needs. What a build that is dropped leaves behind is a thread that waits for a peer.
Where members send and receive outside a batch (``Like.pairwise``), torch gives every pair a communicator of its own, unless the group
was initialised eagerly: then all of them would be queued one after the other. Such a group is therefore left to initialise itself in its
first collective, as it did when the script made it.

Abort: ``abort`` of torch's object, which tells all of its communicators to give up; each in a thread of its own, because one may wait
for a kernel that is queued behind another one's. Then every kernel ends, with garbage, and no exception tells of it: ``device``.

``nccl2`` (torch 2.14): the same, but for communicators that torch itself reconfigures: made in its reconfigurable mode, they are
initialised nonblocking and within a time (``native``), and torch's watchdog revokes them instead of ending the process.
May not know: migrations, torch's process group objects.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from tmrun.core.errors import WorkerError
from tmrun.worker import graphs, native
from tmrun.worker.comm_gloo import BUILD_TIMEOUT

if TYPE_CHECKING:
    from tmrun.worker.comm import Client, Like

_Type = dist.ProcessGroup.BackendType
_MOMENT_S = 0.05
_VACATE_S = 30.0
"""How long an abort may take before training goes on beside it, with less memory."""
_COPIED = (
    "cga_cluster_size", "collnet_enable", "cta_policy", "max_ctas", "max_p2p_peers", "min_ctas", "net_name", "nvls_ctas", "traffic_class",
)  # fmt: skip
"""Fields of the script's ``pg_options.config`` that a replacement has too; as many as this torch knows."""
_UNDEFINED = (-(2**31), None)


class Handle:
    """The connection of one backend. Aborts once; whoever calls is not kept waiting for it."""

    certain = True
    on_device = True

    def __init__(self, backend: Any, client: Client | None = None) -> None:
        self._backend: Any = backend
        self._client = client
        self._lock = threading.Lock()
        self._aborting: threading.Thread | None = None

    def abort(self) -> int:
        """See ``comm.Connection``."""
        with self._lock:
            if self._aborting is not None:
                return 0
            self._aborting = threading.Thread(target=self._abort, name="tmrun-abort", daemon=True)
            self._aborting.start()
        return 1

    def close(self) -> int:
        """See ``comm.Connection``."""
        count = self.abort()
        self._ended(_VACATE_S)
        return count

    def quiet(self) -> bool:
        """Whether the abort is over; see ``comm.Connection``."""
        return self._ended(_MOMENT_S)

    def vacate(self) -> None:
        """See ``comm.Connection``."""
        self.abort()
        if not self._ended(_VACATE_S):
            what = f"tmrun: NCCL did not give a replaced communicator's memory back within {_VACATE_S:g} s"
            print(f"{what}; training goes on beside it", file=sys.stderr, flush=True)

    def _abort(self) -> None:
        if self._client is not None:
            self._client.close()
        with contextlib.suppress(RuntimeError):  # it took longer than an operation may: nothing else can be done
            self._backend.abort()
        self._backend = None
        if self._client is not None:
            self._client.dispose()

    def _ended(self, timeout_s: float) -> bool:
        if self._aborting is None:
            return False
        self._aborting.join(timeout_s)
        return not self._aborting.is_alive()


class _Making:
    """Torch's constructor waits for nobody; where it initialises at once (``device_id``), only the store can be cut."""

    def abort(self) -> int:
        return 0

    def connection(self, backend: Any) -> Handle:
        return Handle(backend)


class Nccl:
    """A ``comm.Kind``."""

    SIGNS: tuple[str, ...] = (
        "NCCL communicator was aborted",
        "NCCL communicator encountered error",
        "remote process exited or there was a network error",
        "unhandled system error",
        "retrieving ncclUniqueId",
    )
    MISUSE: tuple[str, ...] = ("invalid usage", "invalid argument")
    QUEUED = True

    def __init__(self, name: str, type_: dist.ProcessGroup.BackendType) -> None:
        self.NAME, self.TYPE = name, type_

    def build(self, store: Store, rank: int, size: int, timeout: timedelta, like: Like) -> tuple[Any, Handle]:
        """See ``comm.Kind``."""
        with graphs.apart_from_captures(BUILD_TIMEOUT.total_seconds()):
            return self._build(store, rank, size, timeout, like)

    def _build(self, store: Store, rank: int, size: int, timeout: timedelta, like: Like) -> tuple[Any, Handle]:
        torch_class = class_of(self.NAME)
        options = options_like(torch_class, like.options, timeout)
        options.config.blocking = 1
        reconfigurable = torch_class is getattr(c10d, "ProcessGroupNCCL2", None)
        if reconfigurable:
            options.enable_reconfigure = True
        client = None
        if like.pairwise and like.lasting is not None and not reconfigurable:
            client, lasting = like.lasting()
            store = PrefixStore(self.NAME, lasting)
        backend = torch_class(store, rank, size, options)
        handle = Handle(backend, client)
        try:
            if reconfigurable:
                native.connect(backend, store, rank, size, BUILD_TIMEOUT)
            elif not like.pairwise:
                backend.eager_connect_single_device(like.device)
        except BaseException:
            handle.abort()
            raise
        return backend, handle

    @contextlib.contextmanager
    def making(self) -> Iterator[_Making]:
        """See ``comm.Kind``."""
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            raise WorkerError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch end every process of an NCCL group when one is lost; use INFO or leave it out"
            )
        yield _Making()

    def warm(self, like: Like) -> None:
        """A communicator of this process alone: the library, its kernels, topology and plugins; and proof that NCCL works here."""
        backend, handle = self.build(HashStore(), 0, 1, BUILD_TIMEOUT, like)
        handle.vacate()
        del backend


NCCL = Nccl("nccl", _Type.NCCL)
NCCL2 = Nccl("nccl2", _Type.CUSTOM)


def class_of(name: str) -> Any:
    """Torch's class behind the name of a backend. Raises WorkerError where this torch has none."""
    second = name == "nccl2" or os.environ.get("TORCH_DIST_USE_NCCL2") == "1"
    found = getattr(c10d, "ProcessGroupNCCL2" if second else "ProcessGroupNCCL", None)
    if found is None:
        raise WorkerError(f"this torch ({torch.__version__}) has no {name} backend")
    return found


def options_like(torch_class: Any, given: Any, timeout: timedelta) -> Any:
    """New options with what the script chose, without what ties a communicator to another one or to how it is initialised."""
    options_class = getattr(torch_class, "Options", None) or c10d.ProcessGroupNCCL.Options  # nccl2 takes those of its elder
    options = options_class()
    options._timeout = timeout
    if given is None:
        return options
    options.is_high_priority_stream = given.is_high_priority_stream
    options.group_name, options.global_ranks_in_group = given.group_name, given.global_ranks_in_group
    for name in _COPIED:
        value = getattr(given.config, name, None)
        if value not in _UNDEFINED:
            setattr(options.config, name, value)
    return options
