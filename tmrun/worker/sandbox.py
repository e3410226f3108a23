"""Rehearsing without peers: what a standby's process groups do before it takes a rank.

torch's "fake" backend lets every tensor collective succeed at once without touching anything. Two gaps are filled here: DDP's C++ reducer
wants futures that carry tensors (a small Python group, given to the reducer alone: DDP's logger crashes on a foreign backend in the
GLOO slot), and object collectives would unpickle garbage. Those are *synthesised*: all_gather_object yields our own object for every
rank, broadcast_object_list and scatter_object_list leave what is there. What live ranks recorded then takes their place (``record``).
The same stand-ins serve the end of a step whose groups are poisoned. May not know: migrations, the agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class _DoneWork(dist.Work):
    """Finished from the start; its future carries what DDP expects."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        """Nothing to wait for."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """The result."""
        return self._future


class ReducerGroup(dist.ProcessGroup):
    """Stands in for DDP's group inside its reducer. Whoever installs it must keep the Python object alive."""

    def getBackendName(self) -> str:
        """For torch's messages."""
        return "tmrun_sandbox"

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Ours is the sum."""
        return _DoneWork(list(tensors))

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Ours is the source's."""
        return _DoneWork(list(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Everybody's is ours."""
        for output in outputs[0]:
            output.copy_(inputs[0])
        return _DoneWork(outputs)


def isolate(model: DistributedDataParallel) -> None:
    """Let a freshly made DDP reduce with nobody."""
    stand_in = ReducerGroup(model.process_group.rank(), model.process_group.size())  # type: ignore[call-arg]
    object.__setattr__(model, "_tmrun_stand_in", stand_in)  # keeps it alive
    model.reducer._update_process_group(stand_in)


def connect(model: DistributedDataParallel) -> None:
    """Let it reduce with its real group."""
    model.reducer._update_process_group(model.process_group)


def _gather_objects(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_to_one(obj: Any, object_gather_list: list[Any] | None = None, *_args: Any, **_kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *_args: Any, **_kwargs: Any
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank()]


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


OBJECT_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_gather_object": _gather_objects,
    "gather_object": _gather_to_one,
    "scatter_object_list": _scatter,
    "broadcast_object_list": _nothing,
    "send_object_list": _nothing,
    "recv_object_list": _nothing,
    "monitored_barrier": _nothing,
}
"""Stand-ins, by the name of the function in torch.distributed."""
