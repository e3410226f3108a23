"""Training that continues from a checkpoint when it is started again: for torchrun and, with heartbeats, for ft_launcher."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch.distributed as dist
import work


def heart() -> Any:
    """ft_launcher's monitor of this rank, if it runs us."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return None
    from nvidia_resiliency_ext import fault_tolerance

    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    return client


def main() -> None:
    """Train."""
    args = work.arguments()
    monitor = heart()
    dist.init_process_group("gloo")
    alive = (lambda: None) if monitor is None else monitor.send_heartbeat
    work.train_from_checkpoint(args, alive, contextlib.nullcontext)


if __name__ == "__main__":
    main()
