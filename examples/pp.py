"""Pipeline parallel training (1F1B) of a small model on random data, one stage a rank.

    torchrun --nproc-per-node 2 examples/pp.py --steps 100
    tmrun ... examples/pp.py --steps 100

A standby rehearses without its neighbours, so the stage has to know its shapes: ``input_args`` and ``output_args``.
No rank holds another one's stage: after a crash everybody goes back to the last copy that the ranks keep of each other.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import tmrun  # (tmrun)

WIDTH = 64
BATCH = 16
MICRO = 4


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == stages - 1

    torch.manual_seed(rank)
    model = block()
    takes, gives = (torch.empty(BATCH // MICRO, WIDTH, requires_grad=needed) for needed in (not first, True))
    stage = PipelineStage(model, rank, stages, torch.device("cpu"), input_args=takes, output_args=gives)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run = tmrun.join(model=model, optimizer=optimizer)  # (tmrun)
    for step in run.steps(args.steps):  # (tmrun) was: for step in range(args.steps)
        with step:  # (tmrun)
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(int(step)))  # the same on the first and last rank
            losses: list[torch.Tensor] = []
            optimizer.zero_grad()
            schedule.step(*([x] if first else []), **({"target": x.flip(1), "losses": losses} if last else {}))
            optimizer.step()
        if last and step.committed and step % 10 == 0:
            print(f"step {step:5d}  loss {sum(loss.item() for loss in losses) / MICRO:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
