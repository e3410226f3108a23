"""What DDP, FSDP2 and pipelines need after a step broke off in the middle, and pipeline stages to rehearse.

DDP and FSDP2 keep a step's progress in private fields (expected hooks, running all-gathers, unsharded gradients); after an exception in
forward or backward these are wrong for the next step. Pipeline stages ask their neighbours for shapes, which a rehearsal does not have.
Written for torch 2.10 to 2.13. May not know: why a step broke off.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tmrun.core.errors import WorkerError


def reset_ddp(models: Iterable[DistributedDataParallel]) -> None:
    """Forget the unfinished backward pass. Buckets are rebuilt two steps later, so stayers and joiners must all do this."""
    for model in models:
        model._has_rebuilt_buckets = False
        model.reducer._reset_state()


def reset_fsdp(module: torch.nn.Module) -> None:
    """Forget the unfinished step of every FSDP2 root at or below ``module``."""
    for part in fsdp_parts(module):
        state = part._get_fsdp_state()
        if state._is_root:  # None: it has not run yet
            _reset_root(part, state._state_ctx.all_states)


def fsdp_parts(module: torch.nn.Module) -> list[Any]:
    """What ``fully_shard`` was called for."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import, and not needed by who does not use it
    return [] if fsdp is None else [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def check_fsdp(module: torch.nn.Module) -> None:
    """Raises WorkerError where torch cannot forget an unfinished step."""
    if any(not hasattr(part, "reset_iter_state") for part in fsdp_parts(module)):
        raise WorkerError(f"fully_shard of torch {torch.__version__} cannot run a broken step again (no reset_iter_state); torch 2.13 can")


def holds_gradients(module: torch.nn.Module) -> bool:
    """Whether FSDP2 has summed up gradients that it has not reduced."""
    return any(
        param.unsharded_accumulated_grad is not None or getattr(getattr(param, "_unsharded_param", None), "grad", None) is not None
        for param in _fsdp_params(module)
    )


def shards(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters that FSDP2 shards, whether the module has these or gathered ones just now."""
    return [param.sharded_param for param in _fsdp_params(module)]


def _fsdp_params(module: torch.nn.Module) -> Iterator[Any]:
    for part in fsdp_parts(module):
        for group in part._get_fsdp_state()._fsdp_param_groups:
            yield from group.fsdp_params


def _reset_root(root: Any, states: Iterable[Any]) -> None:
    groups = [group for state in states for group in state._fsdp_param_groups]
    for group in groups:
        _drop_failed_gather(group)
    root.reset_iter_state()
    for group in groups:
        for param in group.fsdp_params:  # reset_iter_state leaves gradients on the unsharded parameters: the redo would add to them
            param.unsharded_accumulated_grad = None
            if getattr(param, "_unsharded_param", None) is not None:
                param._unsharded_param.grad = None


def _drop_failed_gather(group: Any) -> None:
    work = getattr(group._all_gather_result, "all_gather_work", None)
    if isinstance(work, dist.Work):
        try:
            work.wait()
        except RuntimeError:
            group._all_gather_result = None  # reset_iter_state would raise the same error again


def reset_scalers(owners: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Forget which optimizers a GradScaler has unscaled, and what it lent to a fused one: the redo would not unscale, or scale twice."""
    for owner in owners:
        if isinstance(owner, torch.amp.GradScaler):
            owner._per_optimizer_states.clear()
    for optimizer in optimizers:
        for lent in ("grad_scale", "found_inf"):
            if hasattr(optimizer, lent):
                delattr(optimizer, lent)


def reset_pipelines() -> None:
    """Forget the losses that a pipeline schedule has collected: the redo would go backward through them again.

    Schedules are registered nowhere, hence the search; it happens after a crash only, in scripts that use pipelining. By type(): isinstance
    asks weak proxies, which may be dead.
    """
    module: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if module is not None:
        for schedule in (o for o in gc.get_objects() if issubclass(type(o), module._PipelineSchedule)):
            schedule._internal_losses.clear()


def rehearse_pipelines(sandboxed: Callable[[], bool]) -> None:
    """Let pipeline stages rely on the shapes that the script gave, while there is no neighbour to ask."""
    module: Any = sys.modules.get("torch.distributed.pipelining.stage")
    stage: Any = getattr(module, "PipelineStage", None)
    if stage is None or not hasattr(stage, "_warmup_forward_vote") or hasattr(stage, "_tmrun_asks"):
        return
    forward, backward = stage._warmup_forward_vote, stage._warmup_backward_result

    def forward_vote(self: Any, has_backward: bool, received_acc: torch.Tensor | None = None) -> Any:
        if not sandboxed():
            return forward(self, has_backward, received_acc)
        if module.InferenceMode.needs_dynamic(self._user_meta, has_backward):
            raise WorkerError(
                "PipelineStage asks its neighbours for shapes, which a standby that rehearses does not have; "
                "give it input_args and output_args (and input_grads, output_grads for DTensors)"
            )
        return torch.ones(1, dtype=torch.int32, device=self.device)

    def backward_result(self: Any, received_result: torch.Tensor | None = None) -> Any:
        return torch.ones(1, dtype=torch.int32, device=self.device) if sandboxed() else backward(self, received_result)

    stage._tmrun_asks, stage._warmup_forward_vote, stage._warmup_backward_result = forward, forward_vote, backward_result
