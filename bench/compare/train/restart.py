"""Training that continues from a checkpoint when it is started again: for torchrun and, with heartbeats, for ft_launcher."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist
import torch.nn as nn
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
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = work.build(args)
    optimizer = work.optimizer_of(plain)
    first = work.load(args, plain, optimizer)
    model = nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=1)
    data = work.batches(args, rank)
    recorder = work.Recorder(args.out)
    for step in range(first, args.steps):
        start = time.monotonic()
        loss = work.loss_of(args, model, data, rank, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.write(rank, world, step, start, loss)
        if monitor is not None:
            monitor.send_heartbeat()
        if rank == 0 and (step + 1) % args.every == 0:
            work.save(args, plain, optimizer, step + 1)


if __name__ == "__main__":
    main()
