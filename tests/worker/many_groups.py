"""A job with many process groups: overlapping pairs, one made late, transient ones in every step.

Beside its losses every rank logs, a line a step, which connections each of its groups has. When TEST_DIE/<point>-<rank> exists, the
rank dies there: "pairs" before the pairs' collectives, "world" after them, "new" before it makes the transient group, "made" after. With
TEST_NCCL_LOG the groups are NCCL's (``fake_nccl``), and one more pair is used in the first step only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import fake_nccl
import torch
import torch.distributed as dist
import torch.nn as nn

import tmrun
from tmrun.worker.current import HOLDER

PAIRS = ((0, 1), (2, 3), (1, 3), (0, 2))
LATE_STEP = 2
NCCL = "TEST_NCCL_LOG" in os.environ


def connections() -> dict[str, list[str]]:
    runtime: Any = HOLDER.runtime
    groups = runtime._process.live.groups
    return {",".join(map(str, g.ranks)) + "/" + g.name: marks(g.connection) for g in groups}


def marks(connection: Any) -> list[str]:
    return [str(connection._backend.serial)] if NCCL else sorted(inode for _, inode in connection.sockets)


def total(group: dist.ProcessGroup | None) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return ones.item()


def main() -> None:  # noqa: C901  a script
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if NCCL:
        fake_nccl.install("cpu:nccl")
    dist.init_process_group("cpu:nccl" if NCCL else "gloo")
    rank, die = dist.get_rank(), Path(os.environ["TEST_DIE"])
    pairs: list[Any] = []
    for ranks in PAIRS:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            pairs.append(group)
    rare = dist.new_group([2, 3]) if NCCL else None
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tmrun.join(model=model, optimizer=optimizer)
    late: list[Any] = []

    def point(name: str) -> None:
        if not run.rehearsing and (die / f"{name}-{rank}").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def check(value: float, expected: float) -> None:
        assert run.rehearsing or value == expected, (rank, value, expected)

    for step in run.steps(args.steps):
        with step:
            if not run.rehearsing:
                time.sleep(0.05)
            if NCCL and not run.rehearsing:
                fake_nccl.note(None, f"step {int(step)}")
            if NCCL and step == 0 and rank in (2, 3):
                check(total(rare), 2)
            point("pairs")
            for group in pairs + late:
                check(total(group), 2)
            point("world")
            check(total(None), 4)
            if step == LATE_STEP and not late and not run.rehearsing:
                group = dist.new_group([0, 2])
                late = [group] if rank in (0, 2) else []
            point("new")
            transient = dist.new_group([0, 1, 2, 3])
            point("made")
            check(total(transient), 4)
            dist.destroy_process_group(transient)
            model(torch.ones(1, 4) * (step + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            with open(args.log_losses / f"groups{rank}.txt", "a") as log:
                log.write(json.dumps([int(step), os.getpid(), connections()]) + "\n")
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print("final parameters sha256", digest, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
