"""Scripts that go on communicating or updating after the first update of a step, each in its own way (TEST_TAIL_OF).

The rank of TEST_QUIET leaves that step after its first update.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import tmrun
from tmrun.worker import faults


def printed(step: int, model: torch.nn.Module) -> None:
    count = torch.ones(1)
    dist.all_reduce(count)
    sparse = torch.eye(2).to_sparse()
    dist.all_reduce(sparse)
    if step % 2 == 0:
        rank, world, left = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
        works = [dist.isend(count, (rank + 1) % world), dist.irecv(left, (rank - 1) % world)]  # nobody's send can end before its receive
        assert [work.wait() for work in works]
        twice = functional.all_reduce(functional.all_reduce(count, "sum", dist.group.WORLD), "sum", dist.group.WORLD)
        print("ranks", count.item(), twice.item())


def by_hand(step: int, model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def given(step: int, model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)


def copied(step: int, model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        mean = parameter.detach().clone()
        dist.all_reduce(mean)
        parameter.data.copy_(mean / dist.get_world_size())


def waited_for(step: int, model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        mean = parameter.detach().clone()
        dist.all_reduce(mean, async_op=True).wait()
        parameter.data.copy_(mean / dist.get_world_size())


def flattened(step: int, model: torch.nn.Module) -> None:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat / dist.get_world_size(), model.parameters())


AFTER = {each.__name__: each for each in (printed, by_hand, given, copied, waited_for, flattened)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses", type=Path)
    args = parser.parse_args()
    how = os.environ["TEST_TAIL_OF"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    first, second = (DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2))
    one = torch.optim.SGD(first.parameters(), 0.1, momentum=0.9)
    two = torch.optim.LBFGS(second.parameters(), 0.1, max_iter=1) if how == "closure" else torch.optim.SGD(second.parameters(), 0.1)
    average = AveragedModel(first.module)
    run = tmrun.join(first=first, second=second, one=one, two=two, average=average)
    fault = None if run.rehearsing else faults.from_environment(rank)

    def backward(step: int, model: torch.nn.Module) -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.full((2, 4), float(step + rank))).square().mean()
        loss.backward()
        return loss

    for step in run.steps(args.steps):
        with step:
            backward(step, first)
            if how not in ("backward", "closure"):
                backward(step, second)
            one.step()
            if fault is not None:
                fault(int(step), "between_updates")
            if f"{rank}:{step}" == os.environ.get("TEST_QUIET"):
                continue
            if how == "backward":
                backward(step, second)
            if how == "printed" and step != 5:
                dist.all_reduce(torch.ones(1))
            two.step(lambda step=step: backward(step, second)) if how == "closure" else two.step()
            AFTER.get(how, lambda *_: None)(step, second)
            average.update_parameters(first.module)
        if step.committed and fault is None:
            print("committed", int(step), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
