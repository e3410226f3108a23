"""Scripts that use tmrun wrongly, each in its own way (TEST_MISUSE)."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

import tmrun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses")
    args = parser.parse_args()
    how = os.environ["TEST_MISUSE"]
    dist.init_process_group("gloo")
    model, average = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
    run = tmrun.join(model=model, optimizer=optimizer)
    for step in run.steps(args.steps):
        if how == "outside":
            continue
        with step:
            if how == "nested":
                with step:
                    pass
            if how != "sums" and (how != "micro-batches" or step % 4 == 0):
                optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            if how != "micro-batches" or step % 4 == 3:
                optimizer.step()
            if how == "optimizer":
                second.step()
        if how == "again":
            list(run.steps(1))
    print("end", average.weight.numel())


if __name__ == "__main__":
    main()
