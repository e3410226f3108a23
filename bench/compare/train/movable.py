"""Training under tmrun: the three lines, nothing else. No checkpoints: nothing is ever read back from one."""

from __future__ import annotations

import time

import torch.distributed as dist
import torch.nn as nn

import tmrun

import work  # isort: skip - after tmrun, which it would otherwise stand in for


def main() -> None:
    """Train."""
    args = work.arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plain = work.build(args)
    optimizer = work.optimizer_of(plain)
    model = nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=1)
    data = work.batches(args, rank)
    recorder = work.Recorder(args.out)

    def on_role(new: int) -> None:
        nonlocal rank
        rank = data.rank = new

    run = tmrun.join(model=model, optimizer=optimizer, batches=data, on_role=on_role)
    for step in run.steps(args.steps):
        start = time.monotonic()
        with step:
            loss = work.loss_of(args, model, data, rank, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.committed and not run.rehearsing:
            recorder.write(rank, dist.get_world_size(), step, start, loss)


if __name__ == "__main__":
    main()
