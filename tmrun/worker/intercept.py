"""Where torch is caught, so that an unmodified script can be moved. Installed once a process, before the script runs.

- ``init_process_group`` (both names): the store becomes the job's, a rehearsing process gets a private one.
- ``c10d._new_process_group_helper``: sees every group, subgroups included, and gives it a part of the store that belongs to the epoch.
- ``split_group`` and ``shrink_group``: refused, they would make groups that nothing here sees. ``init_process_group(device_id=...)`` would
  make torch split groups by itself (``new_group``, device meshes); it is not told of the device, and initialises NCCL at its first use.
- CUDA graphs: refused if they have collectives in them (``graphs``).
- ``_set_pg_timeout``: later communicators keep it.
- ``destroy_process_group``: groups that are gone need no switching.
- ``DistributedDataParallel.__init__``: a rehearsing process must not reduce.
- the global optimizer hooks: the vote. ``torch.autograd.backward``, with which ``gradients`` knows which step made them.
- the collectives in ``torch.distributed``, functional ones too: recorded in a live rank's first step, replayed or synthesised while
  rehearsing. In ``torch.distributed`` a communication error before a step's vote is remembered, even if the script swallows it; one
  after the vote must not cut off the rest of the step (a scheduler.step() would be lost), so there it turns into a no-op.
- what writes and reads checkpoints, in a standby (``checkpoints``).
Calls that are being compiled go straight to the original. May not know: what the runtime does with all this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tmrun.core.errors import WorkerError
from tmrun.worker import checkpoints, graphs, record, sandbox
from tmrun.worker.live import Made

if TYPE_CHECKING:
    from tmrun.worker.runtime import Runtime

_TENSOR_COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier",
    "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip


def install(runtime: Runtime) -> None:
    """Catch everything, for this runtime."""
    _catch_init(runtime)
    _catch_groups(runtime)
    _catch_ddp(runtime)
    _catch_backward(runtime)
    register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: runtime.before_update(optimizer, closure=any(map(callable, (*args[1:], *kwargs.values()))))
    )
    register_optimizer_step_post_hook(lambda *_: runtime.after_update())
    graphs.guard(lambda: runtime.calls)
    for name in (*_TENSOR_COLLECTIVES, *sandbox.OBJECT_COLLECTIVES):
        if hasattr(dist, name):
            setattr(dist, name, _guarded(runtime, getattr(dist, name), sandbox.OBJECT_COLLECTIVES.get(name)))
    for name in record.FUNCTIONAL:
        if hasattr(functional, name):
            setattr(functional, name, _heard(runtime, getattr(functional, name)))
    if runtime.sandboxed:
        checkpoints.guard(lambda: runtime.sandboxed)
    c10d.isend, c10d.irecv = dist.isend, dist.irecv  # dist.P2POp takes no others


def _catch_init(runtime: Runtime) -> None:
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None, init_method: str | None = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
        store: Store | None = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if store is not None:
            raise WorkerError(
                "init_process_group(store=...) cannot be used under tmrun: the store has to outlive this process; leave it out"
            )
        _check_place("rank", rank, runtime.rank)
        _check_place("world_size", world_size, runtime.world)
        if kwargs.get("enable_reconfigure"):
            raise WorkerError("init_process_group(enable_reconfigure=True) under tmrun, which replaces communicators itself; leave it out")
        original(backend, None, timeout, runtime.world, runtime.rank, runtime.open_base_store(), *args, **kwargs)
        runtime.initialised(functools.partial(init_process_group, backend, init_method, timeout, world_size, -1, None, *args, **kwargs))

    dist.init_process_group = c10d.init_process_group = init_process_group


def _check_place(name: str, given: int, ours: int) -> None:
    if given not in (-1, ours):
        raise WorkerError(f"init_process_group({name}={given}) under tmrun, which assigned {ours}; leave it out")


def _catch_groups(runtime: Runtime) -> None:
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def helper(
        size: int, rank: int, ranks: list[int], backend: Any, store: Any, name: Any, backend_options: Any = None, **kwargs: Any
    ) -> Any:
        timeout = kwargs["timeout"]
        kwargs["device_id"] = None
        with runtime.making_group(name, backend) as making:
            if runtime.sandboxed:
                result = _make_fake(original, size, rank, ranks, backend, store, name, **kwargs)
            else:
                kwargs["timeout"] = runtime.patience(timeout)
                result = original(size, rank, ranks, backend, runtime.scoped(store), name, backend_options, **kwargs)
        pg = result[0]
        if not isinstance(pg, dist.ProcessGroup):
            return result
        own = PrefixStore(f"{name}/", store)  # as torch would, without our part: groups made from this one add the epoch of their time
        c10d._world.pg_map[pg] = (c10d._world.pg_map[pg][0], own)
        runtime.add_group(Made(name, pg, tuple(ranks) or tuple(range(size)), backend, timeout, backend_options), making)
        return pg, own

    c10d._new_process_group_helper = helper  # type: ignore[assignment]
    barrier = c10d._store_based_barrier

    @functools.wraps(barrier)
    def store_based_barrier(rank: int, store: Any, *args: Any, **kwargs: Any) -> None:
        with runtime.making_group():
            barrier(rank, runtime.scoped(store), *args, **kwargs)

    c10d._store_based_barrier = store_based_barrier
    set_timeout = c10d._set_pg_timeout

    @functools.wraps(set_timeout)
    def set_pg_timeout(timeout: Any, group: dist.ProcessGroup | None = None) -> None:
        if not runtime.set_timeout(group or c10d._get_default_group(), timeout):
            set_timeout(timeout, group)

    c10d._set_pg_timeout = set_pg_timeout
    for refused in ("split_group", "shrink_group"):
        if hasattr(dist, refused):
            setattr(dist, refused, _refused(refused))
            setattr(c10d, refused, getattr(dist, refused))
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        runtime.remove_group(None if group is None or group is dist.group.WORLD else group)
        destroy(group)

    dist.destroy_process_group = c10d.destroy_process_group = destroy_process_group


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise WorkerError(f"dist.{name}() makes groups that tmrun cannot move; use dist.new_group")

    return refuse


def _make_fake(original: Any, size: int, rank: int, ranks: list[int], backend: Any, store: Any, name: Any, **kwargs: Any) -> Any:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    result = original(size, rank, ranks, c10d.Backend("fake"), store, name, None, **kwargs)
    pg = result[0]
    if isinstance(pg, dist.ProcessGroup):  # so that get_backend() answers as it will in the job
        c10d._world.pg_map[pg] = (backend, result[1])
        c10d._world.pg_backend_config[pg] = str(c10d.BackendConfig(c10d.Backend(backend)))
    return result


def _catch_ddp(runtime: Runtime) -> None:
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        runtime.add_ddp(self)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def _catch_backward(runtime: Runtime) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            graphs.note_backward()
            runtime.before_backward()
        original(*args, **kwargs)

    torch.autograd.backward = backward


def _guarded(runtime: Runtime, original: Callable[..., Any], stand_in: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return runtime.collective(original, stand_in, args, kwargs)

    return collective


def _heard(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """A functional collective: recorded or replayed, else as it is."""

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return runtime.functional(original, args, kwargs)

    return collective
