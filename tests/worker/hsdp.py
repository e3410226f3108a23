"""FSDP2 on a 2x2 mesh (replicate x shard): sharded state, subgroups, a gradient that is not there in one piece anywhere."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tmrun
from tmrun.worker import faults

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1, self.training)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"rank{rank}")
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(100, WIDTH), Block(), Block(), nn.Linear(WIDTH, 100))
    torch.manual_seed(50 + rank)
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    run = tmrun.join(model=model, optimizer=optimizer)
    fault, at = None if run.rehearsing else faults.from_environment(rank), [0]

    def backward(*_: Any) -> None:
        if fault is not None:
            fault(at[0], "backward")

    model[1].register_full_backward_hook(backward)
    for step in run.steps(args.steps):
        with step:
            at[0] = int(step)
            time.sleep(0.02)
            generator = torch.Generator().manual_seed(step * 100 + rank)
            tokens = torch.randint(0, 100, (4, 17), generator=generator)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step.committed:
            with open(args.log_losses / f"rank{rank}.txt", "a") as log:
                log.write(f"{step} {loss.item().hex()}\n")
    whole = [p.full_tensor() for p in model.parameters()]
    if rank == 0:
        print("final parameters sha256", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in whole)).hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
