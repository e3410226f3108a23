"""What DDP and FSDP2 need after a step broke off in the middle.

They keep a step's progress in private fields (expected hooks, running all-gathers, unsharded gradients); after an exception in forward or
backward these are wrong for the next step. Written for torch 2.10 to 2.13. May not know: why a step broke off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def reset_ddp(models: Iterable[DistributedDataParallel]) -> None:
    """Forget the unfinished backward pass. Buckets are rebuilt two steps later, so stayers and joiners must all do this."""
    for model in models:
        model._has_rebuilt_buckets = False
        model.reducer._reset_state()


def reset_fsdp(module: torch.nn.Module) -> None:
    """Forget the unfinished step of every FSDP2 root below ``module``."""
    for root in module.modules():
        if hasattr(root, "reset_iter_state"):
            _reset_root(root)
            return


def _reset_root(root: Any) -> None:
    groups = [g for state in root._get_fsdp_state()._state_ctx.all_states for g in state._fsdp_param_groups]
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
