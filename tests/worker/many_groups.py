"""A job with many process groups: overlapping pairs, one made late, transient ones in every step.

Every rank logs, a line a step, which connections each of its groups has. When TEST_DIE/<point>-<rank> exists, the rank dies there:
"pairs" before the pairs' collectives, "world" after them, "new" before it makes the transient group, "made" after; TMRUN_TEST_KILL may
name these points too. TEST_LATE: members of the late group, and the step that makes it; TEST_DIRECTLY=1: it is used by its methods. With
TEST_STALE=1 ranks 0 and 2 use the world's first communicator past all groups (``stale``): in the first step, and again once TEST_DIE/stale
exists. With TEST_NCCL_LOG the groups are NCCL's (``fake_nccl``), and one more pair is used in the first step only.
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
from stale import Stale

import tmrun
from tmrun.worker import faults
from tmrun.worker.current import HOLDER

PAIRS = ((0, 1), (2, 3), (1, 3), (0, 2))
*LATE, LATE_STEP = map(int, os.environ.get("TEST_LATE", "0,2,2").split(","))
NCCL = "TEST_NCCL_LOG" in os.environ


def connections() -> dict[str, list[str]]:
    runtime: Any = HOLDER.runtime
    managed = () if runtime is None else runtime._process.live.groups
    return {",".join(map(str, g.ranks)) + "/" + g.name: marks(g.connection) for g in managed}


def marks(connection: Any) -> list[str]:
    return [str(connection._backend.serial)] if NCCL else sorted(inode for _, inode in connection.sockets)


def total(group: dist.ProcessGroup | None) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return ones.item()


def total_directly(group: dist.ProcessGroup) -> float:
    ones = torch.ones(1)
    group.allreduce([ones]).wait()
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
    torch.manual_seed(50 + rank)
    run = tmrun.join(model=model, optimizer=optimizer)
    late: list[Any] = []
    fault = None if run.rehearsing else faults.from_environment(rank)
    stale = Stale(dist.group.WORLD, args.log_losses) if "TEST_STALE" in os.environ and not run.rehearsing and rank in (0, 2) else None
    use = total_directly if os.environ.get("TEST_DIRECTLY") == "1" else total

    def point(name: str) -> None:
        if not run.rehearsing and (die / f"{name}-{rank}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is not None:
            fault(int(step), name)

    def check(value: float, expected: float) -> None:
        assert run.rehearsing or value == expected, (rank, value, expected)

    for step in run.steps(args.steps):
        with step:
            batch = torch.rand(1, 4)  # before anybody dies
            if not run.rehearsing:
                time.sleep(0.05)
            if stale is not None and step == 0:
                stale.use("early")
            if stale is not None and (die / "stale").exists():
                stale.use("late")
                stale = None
            if NCCL and not run.rehearsing:
                fake_nccl.note(None, f"step {int(step)}")
            if NCCL and step == 0 and rank in (2, 3):
                check(total(rare), 2)
            point("pairs")
            for group in pairs:
                check(total(group), 2)
            for group in late:
                check(use(group), 2)
            point("world")
            check(total(None), 4)
            if step == LATE_STEP and not late and not run.rehearsing:
                group = dist.new_group(LATE)
                late = [group] if rank in LATE else []
            point("new")
            transient = dist.new_group([0, 1, 2, 3])
            point("made")
            check(total(transient), 4)
            model(batch).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=transient)
            dist.destroy_process_group(transient)
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
