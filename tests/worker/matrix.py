"""One small training script for every parallelism: ``--mode``; what varies within one: TEST_ACCUMULATE, TEST_BF16, TEST_WIDTH,
TEST_EVALUATE: one more forward pass after the update, and TEST_ZERO: gradients are not made anew, but set to zero ``before`` or ``after``.
STAND_IN: instead of gloo a stand-in for NCCL, which is to give the same. With TEST_DAMAGE, what is received looks damaged. TEST_UNEVEN: how
many blocks the second stage of a pipeline has more. TEST_AS_0: what a rehearsal as rank 0 does, ``fail``, ``leave`` or ``linger``.
TEST_COMPILE: blocks are compiled, of a pipeline the stage.

Each step takes TEST_PACE_S seconds more, until the file ``fast`` is there, beside the losses. Logged for a step are its loss, the
parameters after it, and the type of each gradient that came into the first block, one a pass backward.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_nccl
import halfway
import numpy
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tmrun
from tmrun.worker import faults, values

WIDTH = int(os.environ.get("TEST_WIDTH", "16"))
ROWS = 8
ACCUMULATE = int(os.environ.get("TEST_ACCUMULATE", "1"))
EVALUATE = os.environ.get("TEST_EVALUATE") == "1"
ZERO = os.environ.get("TEST_ZERO", "")
BF16 = os.environ.get("TEST_BF16") == "1"
COMPILE = os.environ.get("TEST_COMPILE") == "1"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.narrow(F.gelu(self.wide(x))), 0.1, self.training)


class Job:
    """A model, what has to run for one micro batch, and who draws which data and random numbers."""

    def __init__(self, seed: int, blocks: int = 3) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(*(Block() for _ in range(blocks)))
        self.first, self.second = self.model[0], self.model[1]
        self.data_rank = self.dropout_rank = dist.get_rank()
        self.step = 0
        self.passes: list[str] = []
        if not COMPILE:
            self.first.narrow.register_full_backward_hook(self.passed)

    def passed(self, module: nn.Module, taken: Any, given: tuple[torch.Tensor, ...]) -> None:
        self.passes.append(str(given[0].dtype).removeprefix("torch."))

    def backward(self, x: torch.Tensor, y: torch.Tensor, last: bool) -> float:
        with self.quiet(last):
            with self.mixed():
                loss = F.mse_loss(self.forward(x), y) / ACCUMULATE
            loss.backward()
        return loss.item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def mixed(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=BF16)

    def quiet(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def compile(self) -> None:
        for module in self.model.modules():
            if isinstance(module, Block):
                module.compile()

    def reduce(self) -> None:
        pass

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not ZERO)

    def evaluate(self, x: torch.Tensor) -> None:
        if EVALUATE:
            self.model.eval()
            with torch.no_grad():
                self.model(x)
            self.model.train()


class Ddp(Job):
    def __init__(self, **options: Any) -> None:
        super().__init__(7)
        self.model = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=0.01, **options)
        self.never_quiet = self.model.static_graph  # torch finds the graph in the first pass backward, and cannot without its reducer

    def quiet(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last or self.never_quiet else self.model.no_sync()


class Flat(Job):
    """Data parallel by hand: all gradients are views of one buffer, made once. The last block is used in every second step only."""

    def __init__(self) -> None:
        super().__init__(7)
        parameters = list(self.model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.model if self.step % 2 else self.model[:2])(x)

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        self.flat.zero_()

    def reduce(self) -> None:
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()


class Fsdp(Job):
    def __init__(self, *shape: int) -> None:
        super().__init__(7)
        mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=("replicate", "shard")[-max(1, len(shape)) :])
        for block in self.model:
            fully_shard(block, mesh=mesh)
        if EVALUATE:  # the root has parameters of its own, which stay gathered after an evaluation
            self.model.append(nn.Linear(WIDTH, WIDTH))
        fully_shard(self.model, mesh=mesh)

    def quiet(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class Tp(Job):
    """Tensor parallel, with data parallel sharding over the other dimension of the mesh if that has more than one."""

    def __init__(self, dp: int) -> None:
        super().__init__(7)
        mesh = init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "tp"))
        for block in self.model:
            parallelize_module(block, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        if dp > 1:
            for block in self.model:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(self.model, mesh=mesh["dp"])
        self.data_rank = self.dropout_rank = mesh["dp"].get_local_rank()


class Pipeline(Job):
    """Two stages under 1F1B; several pipelines reduce over the data parallel dimension by hand."""

    def __init__(self, dp: int) -> None:
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "pp"))
        self.place = mesh["pp"].get_local_rank()
        super().__init__(7 + self.place, blocks=2 + self.place * int(os.environ.get("TEST_UNEVEN", "0")))
        self.data_rank = mesh["dp"].get_local_rank()
        self.dp, self.size = mesh.get_group("dp"), dp
        takes, gives = (torch.empty(ROWS // 4, WIDTH, requires_grad=needed) for needed in (self.place > 0, True))
        stage = PipelineStage(
            self.model, self.place, 2, torch.device("cpu"), input_args=takes, output_args=gives, group=mesh.get_group("pp")
        )
        self.schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)

    def compile(self) -> None:
        self.model.compile()  # as one: stages of different depth have nothing in common

    def backward(self, x: torch.Tensor, y: torch.Tensor, last: bool) -> float:
        losses: list[torch.Tensor] = []
        with self.mixed():
            if self.place == 0:
                self.schedule.step(x)
            else:
                self.schedule.step(target=y, losses=losses)
        return float(sum(loss.item() for loss in losses))

    def reduce(self) -> None:
        if self.size > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, group=self.dp)
                parameter.grad /= self.size


MODES: dict[str, Callable[[], Job]] = {
    "ddp": Ddp,
    "ddp_static": lambda: Ddp(static_graph=True),
    "ddp_views": lambda: Ddp(gradient_as_bucket_view=True),
    "flat": Flat,
    "fsdp2": Fsdp,
    "hsdp": lambda: Fsdp(2, dist.get_world_size() // 2),
    "tp": lambda: Tp(1),
    "fsdp2_tp": lambda: Tp(2),
    "pp": lambda: Pipeline(1),
    "pp_dp": lambda: Pipeline(2),
}


def local_digest(*owned: Any) -> str:
    """Of what this rank holds: parameters and optimizer state."""
    digest = hashlib.sha256()
    for tensor in owned:
        tensor = tensor.detach()
        digest.update((tensor.to_local() if hasattr(tensor, "to_local") else tensor).contiguous().numpy().tobytes())
    return digest.hexdigest()


def initialise(backend: str) -> None:
    if backend != "gloo":
        fake_nccl.install(backend)
    dist.init_process_group(backend)


def on_request() -> None:
    """What a test asks for."""
    if "TEST_STACKS_S" in os.environ:  # for whoever has to find out where a job hangs
        faulthandler.dump_traceback_later(float(os.environ["TEST_STACKS_S"]))
    if "TEST_DAMAGE" in os.environ:
        sums = values.sums
        values.sums = lambda part: sums(part + 1)


def seed(number: int) -> None:
    for each in (torch.manual_seed, random.seed, numpy.random.seed):
        each(number)


def as_rank_0(what: str) -> None:
    """In a rehearsal."""
    if what == "fail":
        raise RuntimeError("as rank 0 it fails")
    if what == "leave":
        sys.exit(3)
    while what == "linger":
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.01)


def train(job: Job, parameters: list[Any], optimizer: torch.optim.Optimizer, schedule: Any) -> float:
    """One step; its loss."""
    if ZERO != "after":
        job.zero(optimizer)
    loss = 0.0
    job.passes.clear()
    for part in range(ACCUMULATE):
        generator = torch.Generator().manual_seed((job.step * 100 + job.data_rank) * 10 + part)
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator) * (0.5 + random.random() + numpy.random.rand())
        loss += job.backward(x, y, last=part == ACCUMULATE - 1)
    job.reduce()
    nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    schedule.step()
    if ZERO == "after":
        job.zero(optimizer)
    job.evaluate(x)
    return loss


def at(point: str, job: Job, fault: faults.Fault | None) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        if fault is not None:
            fault(job.step, point)

    return hook


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    on_request()
    initialise(os.environ.get("STAND_IN", "gloo"))
    rank = dist.get_rank()
    job = MODES[os.environ["TEST_MODE"]]()
    if COMPILE:
        job.compile()
    seed(50 + job.dropout_rank)
    parameters = list(job.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)

    run = tmrun.join(model=job.model, optimizer=optimizer, schedule=schedule)
    halfway.install()
    fault = None if run.rehearsing else faults.from_environment(rank)

    if run.rehearsing and rank == 0:
        as_rank_0(os.environ.get("TEST_AS_0", ""))
    job.first.narrow.register_full_backward_hook(at("backward", job, fault))
    job.second.register_forward_pre_hook(at("forward", job, fault))
    for step in run.steps(args.steps):
        with step:
            job.step = int(step)
            time.sleep(0.0 if (args.log_losses / "fast").exists() else float(os.environ.get("TEST_PACE_S", "0.02")))
            loss = train(job, parameters, optimizer, schedule)
        if run.rehearsing:
            print("rehearsed", int(step), loss.hex(), flush=True)
        if step.committed:
            with open(args.log_losses / f"rank{rank}.txt", "a") as log:
                log.write(f"{step} {loss.hex()}/{local_digest(*parameters)[:16]}/{','.join(job.passes)}\n")
    mine = local_digest(*parameters, *(v for s in optimizer.state.values() for v in s.values()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        print("final parameters sha256", hashlib.sha256("".join(everyone).encode()).hexdigest(), flush=True)
    if "TEST_REFERENCE" in os.environ:
        os._exit(0)  # freeing DDP with its group after a late collective can deadlock in torch: gloo's threads want the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
