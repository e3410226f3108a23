"""The training script of overhead.py: DDP on a small GPT, steps of a given length, times written by rank 0."""

from __future__ import annotations

import argparse
import json
import runpy
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import tmrun
from tmrun.worker.current import HOLDER
from tmrun.worker.wires import Wires

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "gpt_ddp.py"), run_name="example")


WIDTH = 1024


def timed(owner: Any, name: str, into: list[float]) -> None:
    """Measure a method of the runtime; only calls that did something (a second optimizer hook returns at once) count."""
    plain: Callable[..., Any] = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - began)

    setattr(owner, name, method)


def by_vote(waits: list[float], votes: int) -> list[float]:
    """Sums of what a vote waited for in its parts."""
    parts = max(1, len(waits) // max(1, votes))
    return [sum(waits[i : i + parts]) for i in range(0, len(waits), parts)]


def per_call(call: Callable[[], Any]) -> float:
    """Seconds, the best of some."""
    return min(timeit.repeat(call, number=10_000, repeat=5)) / 10_000


def caught(runtime: Any) -> dict[str, float]:
    """What is added to a collective's call: in all, and of that where the recorder of the first step was."""

    def nothing() -> None:
        pass

    plain = per_call(nothing)
    return {
        "all": per_call(lambda: runtime.collective(nothing, None, (), {})) - plain,
        "recorder": per_call(lambda: runtime._heard(nothing, (), {})) - plain,
    }


def wide(layers: int, *, sharded: bool) -> nn.Module:
    """State of 12 bytes a parameter, all of it on each rank, or a part."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    if not sharded:
        return nn.parallel.DistributedDataParallel(model)
    fully_shard(model)
    return model


def fill(until: float, *, compute: bool) -> None:
    """Let the rest of a step pass: asleep, as one that waits for a GPU, or with small matrix products."""
    if not compute:
        time.sleep(max(0.0, until - time.perf_counter()))
        return
    matrix = torch.ones(64, 64)
    while time.perf_counter() < until:
        matrix = torch.mm(matrix, matrix).clamp_(-1, 1)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--fill", choices=["sleep", "compute"], default="sleep", help="what a step does until its time is over")
    parser.add_argument("--slack", action="store_true", help="that passes after the backward pass, in which ranks meet, not before it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sharded", type=int, default=0, help="FSDP2 on so many layers of 1024 x 1024 instead of DDP on a GPT")
    parser.add_argument("--wide", type=int, default=0, help="DDP on so many of them")
    parser.add_argument("--agree", action="store_true", help="one number is summed over all ranks before each update")
    parser.add_argument("--log-losses")  # the harness gives it
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = args.sharded or args.wide
    small = nn.parallel.DistributedDataParallel(EXAMPLE["GPT"](64, 2, 0.1)) if not layers else None
    model = small or wide(layers, sharded=args.sharded > 0)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batches = EXAMPLE["Batches"](EXAMPLE["standard_library"](), 4, rank, 0)
    inside: dict[str, list[float]] = {"begin": [], "vote": [], "waits": [], "end": [], "between": []}
    if HOLDER.runtime is not None:
        timed(Wires, "receive", inside["waits"])
        for name, method in (("begin", "begin"), ("vote", "before_update"), ("end", "end"), ("between", "_boundary")):
            timed(HOLDER.runtime, method, inside[name])
    run = tmrun.join(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    steps, begun, before = [], [], time.perf_counter()
    for step in run.steps(args.steps):
        with step:
            began = time.perf_counter()
            begun.append(time.monotonic())
            inputs, targets = batches.next()
            loss = model(torch.randn(4, WIDTH)).sum() if layers else F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            if not args.slack:
                fill(began + args.step_ms / 1e3, compute=args.fill == "compute")
            loss.backward()
            if args.slack:
                fill(began + args.step_ms / 1e3, compute=args.fill == "compute")
            if args.agree:
                dist.all_reduce(torch.zeros(1))
            optimizer.step()
            schedule.step()
        now = time.perf_counter()
        steps.append(now - before)
        before = now
    if rank == 0:
        inside["waits"] = by_vote(inside["waits"], len(inside["vote"]))
        calls = caught(HOLDER.runtime) if HOLDER.runtime is not None else {}
        args.out.write_text(json.dumps({"steps": steps, "began": begun, "inside": inside, "calls": calls}))
    dist.barrier()


if __name__ == "__main__":
    main()
