"""A small job whose batches come from a loader, TEST_LOADER: ``workers``, a plain one with worker processes; ``distributed``, one with a
DistributedSampler and none of them; ``stateful``, torchdata's, which a successor tells where to go on. TEST_MODE: ``ddp`` or ``fsdp2``.

The loss draws from every random generator, and so does the dataset, but for ``stateful``, whose workers forget what they drew. Logged
for a step are the indices of its batch, its loss, and the parameters after it. A worker process of a loader locks a file in the folder
``workers`` beside the log for as long as it lives; the file is called after its rank's process and its own.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn as nn
from matrix import local_digest, seed
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tmrun
from tmrun.worker import faults

WIDTH = 16
ITEMS, ROWS = 28, 4
HOW = os.environ["TEST_LOADER"]
SHARDED = os.environ["TEST_MODE"] == "fsdp2"


def drawn() -> float:
    """From everybody that a script may ask."""
    return float(random.random() + numpy.random.rand() + torch.rand(()).item())


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return index, x if HOW == "stateful" else x * drawn()


def sign_in(folder: Path, worker: int) -> None:
    """A worker process begins."""
    file = os.open(folder / f"{os.getppid()}-{os.getpid()}", os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)


def loader(folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    begin = functools.partial(sign_in, folder)
    if HOW == "distributed":
        return DataLoader(Items(), ROWS, sampler=DistributedSampler(Items(), seed=3))
    if HOW == "workers":
        return DataLoader(Items(), ROWS, shuffle=True, num_workers=2, worker_init_fn=begin)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Items(), ROWS, shuffle=True, num_workers=2, worker_init_fn=begin)


def build() -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    return fully_shard(model) if SHARDED else nn.parallel.DistributedDataParallel(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*is deprecated, please do not call")  # in torchdata
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), build()
    seed(50 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # whoever goes back to a copy goes back by more than what was kept
    batches = tmrun.Batches(loader(args.log_losses / "workers"), by_state=HOW == "stateful", keep=1 if SHARDED else 8)
    run = tmrun.join(model=model, optimizer=optimizer, batches=batches)
    fault, at = None if run.rehearsing else faults.from_environment(rank), [0]

    def backward(*_: Any) -> None:
        if fault is not None:
            fault(at[0], "backward")

    layers: Any = model if SHARDED else model.module
    layers[2].register_full_backward_hook(backward)
    for step in run.steps(args.steps):
        with step:
            at[0] = int(step)
            time.sleep(float(os.environ.get("TEST_PACE_S", "0.02")))
            indices, x = next(batches)
            loss = (model(x) * drawn() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.committed:
            with open(args.log_losses / f"rank{rank}.txt", "a") as log:
                log.write(f"{step} {','.join(map(str, indices.tolist()))}/{loss.item().hex()}/{local_digest(*model.parameters())[:16]}\n")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local_digest(*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())))
    if rank == 0:
        print("final parameters sha256", hashlib.sha256("".join(everyone).encode()).hexdigest(), flush=True)
    if "TEST_REFERENCE" in os.environ:
        os._exit(0)  # as in ``matrix``
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
