"""The work that all systems do: the example's GPT, its batches, one step of it, and a record of every step that counts.

Knows no system: torchrun's and the peers' interpreters do not have tmrun, and must not pay for it. A step's batch and its dropout depend on
(seed, rank, step) alone, so that losses can be compared between systems and after a restart.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

STRAGGLER = 1.5
"""So much longer takes a host that was made slow."""
_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt_ddp.py"
sys.modules.setdefault("tmrun", types.ModuleType("tmrun"))  # the example imports it; only its model and data are used here
_example = runpy.run_path(str(_EXAMPLE), run_name="example")


def arguments() -> argparse.Namespace:
    """The command line of every training file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder of the step records")
    parser.add_argument("--checkpoint", type=Path, required=True, help="used by the systems that restart")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pace-ms", type=float, default=100.0, help="sleep in every step, in place of a real model's time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    return args


def build(args: argparse.Namespace) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(args.seed)
    model: nn.Module = _example["GPT"](args.width, args.layers, 0.1)
    if args.compile:
        model.compile()
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def batches(args: argparse.Namespace, rank: int) -> Any:
    """The data of a rank."""
    return _example["Batches"](_example["standard_library"](), args.batch, rank, args.seed)


def loss_of(args: argparse.Namespace, model: nn.Module, data: Any, rank: int, step: int) -> torch.Tensor:
    """Forward pass of one step, with the time that a real model would take."""
    torch.manual_seed((args.seed * 1_000_003 + step) * 4096 + rank)
    data.position = step
    inputs, targets = data.next()
    slow = (args.out.parent / f"slow-{os.environ['BENCH_NODE_NAME']}").exists()
    time.sleep(args.pace_ms / 1e3 * (STRAGGLER if slow else 1))
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Recorder:
    """Appends a line for each step of this process; a line is one write, so that a kill leaves no half of it."""

    def __init__(self, folder: Path) -> None:
        self.node = os.environ["BENCH_NODE_NAME"]
        self.path = folder / f"{self.node}-{os.getpid()}.jsonl"
        self.file: int | None = None

    def write(self, rank: int, world: int, step: int, start: float, loss: torch.Tensor) -> None:
        """The step ends now."""
        if self.file is None:
            self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = {
            "node": self.node,
            "pid": os.getpid(),
            "rank": rank,
            "world": world,
            "step": int(step),
            "start": start,
            "end": time.monotonic(),
            "loss": float(loss.item()).hex(),
        }
        os.write(self.file, (json.dumps(line) + "\n").encode())


def load(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Continue from the last checkpoint, if there is one; the next step."""
    if not args.checkpoint.exists():
        return 0
    found = torch.load(args.checkpoint, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return int(found["step"])


def save(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """After step ``step`` - 1, by rank 0, in one rename."""
    draft = args.checkpoint.with_name(f"{args.checkpoint.name}.{os.getpid()}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
    draft.rename(args.checkpoint)


def train_from_checkpoint(
    args: argparse.Namespace, alive: Callable[[], object], saving: Callable[[], AbstractContextManager[object]]
) -> None:
    """Train, from the last checkpoint on; ``alive`` is called after every step, ``saving`` is around every checkpoint."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = build(args)
    optimizer = optimizer_of(plain)
    first = load(args, plain, optimizer)
    model = nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=1)
    data = batches(args, rank)
    recorder = Recorder(args.out)
    for step in range(first, args.steps):
        start = time.monotonic()
        loss = loss_of(args, model, data, rank, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.write(rank, world, step, start, loss)
        alive()
        if rank == 0 and (step + 1) % args.every == 0:
            with saving():
                save(args, plain, optimizer, step + 1)
