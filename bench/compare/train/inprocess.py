"""Training under NVRx's in-process restart: the function is called again in the same processes, a reserve rank fills the gap.

The wrapper looks at the function's annotations as objects, hence no ``from __future__ import annotations``.
"""

import argparse
import datetime
import os
from typing import Any

import torch.distributed as dist
import work
from nvidia_resiliency_ext import inprocess

ACTIVE = int(os.environ["BENCH_ACTIVE"])
TUNED = bool(os.environ.get("BENCH_TUNED"))


def seconds(value: float) -> datetime.timedelta:
    """As the wrapper wants it."""
    return datetime.timedelta(seconds=value)


def tuning() -> dict[str, Any]:
    """Timeouts that fit steps of 0.1 s; without them the wrapper waits half a minute for a missing rank."""
    if not TUNED:
        return {}
    return {
        "monitor_thread_interval": seconds(0.1),
        "monitor_process_interval": seconds(0.1),
        "heartbeat_interval": seconds(0.25),
        "progress_watchdog_interval": seconds(0.1),
        "heartbeat_timeout": seconds(2),
        "soft_timeout": seconds(3),
        "hard_timeout": seconds(5),
        "last_call_wait": seconds(0.1),
        "termination_grace_time": seconds(0.5),
        "barrier_timeout": seconds(120),
    }


def _rank() -> int:
    return int(os.environ["RANK"])


def _world() -> int:
    return int(os.environ["WORLD_SIZE"])


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"])},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(ACTIVE),
        inprocess.rank_assignment.ShiftRanks(),
    ),
    **tuning(),
)
def train(args: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    """Train, from the last checkpoint on."""
    assert call is not None
    store = dist.PrefixStore(f"call{call.iteration}", STORE)
    dist.init_process_group("gloo", store=store, rank=_rank(), world_size=_world())
    work.train_from_checkpoint(args, call.ping, call.atomic)


if __name__ == "__main__":
    ARGS = work.arguments()
    STORE = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, _world(), is_master=_rank() == 0, multi_tenant=True
    )
    train(ARGS)
