"""Fully sharded training (FSDP2) of a small model on random data.

    torchrun --nproc-per-node 2 examples/fsdp2.py --steps 100
    tmrun ... examples/fsdp2.py --steps 100

No rank holds another one's shard: after a crash everybody goes back to the last copy that the ranks keep of each other.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tmrun  # (tmrun)

WIDTH = 64


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), block())
    for part in [*model, model]:
        fully_shard(part, mesh=mesh)
    torch.manual_seed(1 + rank)  # data and dropout differ between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run = tmrun.join(model=model, optimizer=optimizer)  # (tmrun)
    for step in run.steps(args.steps):  # (tmrun) was: for step in range(args.steps)
        with step:  # (tmrun)
            x = torch.randn(16, WIDTH)
            loss = F.mse_loss(model(x), x.flip(1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if rank == 0 and step.committed and step % 10 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
