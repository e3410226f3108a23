"""Training under torchft: every node is a replica group; the world shrinks when one is lost, and a returning one heals from another."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import torch.optim
import work
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

TUNED = bool(os.environ.get("BENCH_TUNED"))
GROUP_TIMEOUT = datetime.timedelta(seconds=2 if TUNED else 5)
"""Of a collective; 5 s is what torchft's own example takes."""


def main() -> None:
    """Train."""
    args = work.arguments()
    index = int(os.environ["BENCH_INDEX"])
    plain = work.build(args)
    inner: torch.optim.Optimizer = work.optimizer_of(plain)

    def state() -> dict[str, Any]:
        return {"model": plain.state_dict(), "optimizer": inner.state_dict()}

    def load(found: dict[str, Any]) -> None:
        plain.load_state_dict(found["model"])
        inner.load_state_dict(found["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=GROUP_TIMEOUT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"bench_{index}",
        timeout=datetime.timedelta(seconds=5 if TUNED else 30),
        hostname=os.environ["BENCH_ADDRESS"],
    )
    model = DistributedDataParallel(manager, plain, bucket_cap_mb=1)
    optimizer = Optimizer(manager, inner)
    data = work.batches(args, index)
    recorder = work.Recorder(args.out)
    while (step := manager.current_step()) < args.steps:
        start = time.monotonic()
        optimizer.zero_grad()
        loss = work.loss_of(args, model, data, index, step)
        loss.backward()
        optimizer.step()
        if manager.current_step() > step and manager.participating_rank() is not None:
            recorder.write(index, manager.num_participants(), manager.current_step() - 1, start, loss)


if __name__ == "__main__":
    main()
