"""Hybrid sharding (HSDP): FSDP2 on a mesh of two replicas, each of them sharded over half of the ranks.

    torchrun --nproc-per-node 4 examples/hsdp.py --steps 100
    tmrun ... examples/hsdp.py --steps 100

Every shard exists twice: after a crash the successor gets it from the rank that holds the same, which tmrun finds by itself.
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
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

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
