"""A DDP job on a device where operations are only queued, as on a GPU, though the device is a thread and its tensors are on the CPU.

Queued are the reduction of gradients (in place, and its future is complete at once) and the update. So a rank can be at its vote while its
gradients are still being reduced; TEST_LAG_S is how long rank 0's reductions take longer. A reduction that fails leaves garbage and says
nothing; with TEST_LOUD=1 the next synchronisation says it, once. With STAND_IN=cpu:nccl tmrun knows that collectives are only queued. What
computes on the CPU waits for the queue first.
"""

import argparse
import hashlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_nccl
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

import tmrun
from tmrun.worker import device, faults

PACE_S = float(os.environ.get("TEST_PACE_S", "0.02"))
LAG_S = float(os.environ.get("TEST_LAG_S", "0"))


class Queue(device.Cpu):
    """The device."""

    def __init__(self) -> None:
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self.error = ""
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, order: Callable[[], None]) -> None:
        self._orders.put(order)

    def synchronize(self) -> None:
        self._orders.join()
        error, self.error = self.error, ""
        if error:
            raise RuntimeError(error)

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            order()
            self._orders.task_done()


DEVICE = Queue()
device.of = lambda tensors, queues: DEVICE


class QueuedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for p in self.param_groups[0]["params"]]

        def update() -> None:
            with torch.no_grad():
                for parameter, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
                    parameter.add_(gradient, alpha=-self.param_groups[0]["lr"])

        DEVICE.put(update)


def reduce_later(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer, world = bucket.buffer(), dist.get_world_size()

    def reduce() -> None:
        try:
            if LAG_S and dist.get_rank() == 0:
                time.sleep(LAG_S)
            dist.group.WORLD.allreduce([buffer]).wait()  # type: ignore[union-attr]
            buffer.div_(world)
        except RuntimeError as error:
            buffer.fill_(math.nan)
            DEVICE.error = f"an operation on the device failed: {error}" if os.environ.get("TEST_LOUD") else ""

    DEVICE.put(reduce)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if backend := os.environ.get("STAND_IN"):
        fake_nccl.install(backend)
    dist.init_process_group(backend or "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), gradient_as_bucket_view=True)
    model.register_comm_hook(None, reduce_later)
    optimizer = QueuedSGD(model.parameters(), lr=0.1)
    run = tmrun.join(model=model, optimizer=optimizer)
    fault = None if run.rehearsing else faults.from_environment(rank)
    for step in run.steps(args.steps):
        with step:
            DEVICE._orders.join()  # computing needs the parameters
            if not run.rehearsing:
                time.sleep(PACE_S)
            loss = model(torch.ones(2, 4) * (rank + 1) + torch.rand(2, 4)).square().sum()
            optimizer.zero_grad(set_to_none=False)
            if fault is not None:
                fault(int(step), "backward")
            loss.backward()
            optimizer.step()
        if step.committed:
            with open(args.log_losses / f"rank{rank}.txt", "a") as log:
                log.write(f"{int(step)} {loss.item().hex()}\n")
    DEVICE._orders.join()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print("final parameters sha256", digest, flush=True)


if __name__ == "__main__":
    main()
