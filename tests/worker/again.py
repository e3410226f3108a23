"""A tiny job that goes on until the file TEST_STOP exists, and on all ranks stops after the same step. TEST_MODE: ``ddp`` or ``fsdp2``.

A rank writes into the file ``steps``, with its number, how long each step took, from the end of the one before to its own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tmrun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 32))
    model = fully_shard(plain) if os.environ["TEST_MODE"] == "fsdp2" else nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run, stop, enough = tmrun.join(model=model, optimizer=optimizer), Path(os.environ["TEST_STOP"]), torch.zeros(1)
    ended: list[tuple[int, float]] = []
    for step in run.steps(args.steps):
        with step:
            if not run.rehearsing:
                time.sleep(0.01)
            enough.fill_(stop.exists())
            dist.all_reduce(enough, group=pair)
            optimizer.zero_grad()
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
        ended.append((int(step), time.monotonic()))
        if step.committed and enough.item() and not run.rehearsing:
            break
    with open(args.log_losses / f"steps{dist.get_rank()}", "w") as log:
        log.writelines(f"{step} {end - before}\n" for (_, before), (step, end) in pairwise(ended))
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    print("final parameters sha256", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in whole)).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
