"""One process, world size 1: NCCL communicators are built beside one in use, switched to, and what was replaced gives its memory back.

    python bench/gpu_switch.py --device cuda [--switches 5]

Prints one JSON object. MB are of the whole device, so it should be nobody else's. Then a communicator is aborted while the device is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tmrun.worker import nccl_environment

nccl_environment.prepare(os.environ)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tmrun.worker import comm, device, groups, shim  # noqa: E402
from tmrun.worker.comm import Like  # noqa: E402
from tmrun.worker.shim import ShimSwitch  # noqa: E402
from tmrun.worker.slot import SlotSwitch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "worker"))
MINUTE = timedelta(minutes=1)


def main() -> None:
    """Run, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--switches", type=int, default=5)
    args = parser.parse_args()
    here = device.Cuda(0) if args.device == "cuda" else device.Cpu()
    if args.device == "cpu":
        import fake_nccl

        fake_nccl.install("cpu:nccl")
    print(json.dumps(switch(here, "cuda:nccl" if args.device == "cuda" else "cpu:nccl", args.switches)), flush=True)
    os._exit(0)  # torch would tear down what was aborted


def switch(here: device.Device, backend: str, switches: int) -> dict[str, Any]:
    """Seconds of each part, and memory after each."""
    here.use()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    kinds = comm.kinds_of("world", backend)
    first = world._get_backend(here.torch_device)  # before a switch is in its place
    with comm.making(kinds) as making:
        connection = making.connection(lambda _: first)
    module = shim.load() if os.environ.get(groups.ENV_SWITCH) != "slot" else None
    one: Any = ShimSwitch(module, world, kinds, fake=False) if module is not None else SlotSwitch(world, kinds, fake=False)
    memory = {"start": used(here)}
    reduce_some(here)
    memory["first communicator in use"] = used(here)
    took: dict[str, list[float]] = {"build": [], "switch": [], "give back": [], "first use": []}
    after: dict[str, list[float]] = {"built": [], "given back": [], "in use": []}
    made_last: Any = first
    for _ in range(switches):
        made = timed(took["build"], lambda: comm.build(kinds, dist.HashStore(), 0, 1, MINUTE, Like(here.torch_device)))
        after["built"].append(used(here))
        here.synchronize()
        timed(took["switch"], lambda made=made: one.install(made.backends))
        timed(took["give back"], lambda gone=connection: comm.vacate([gone]))
        after["given back"].append(used(here))
        connection, made_last = made.connection, made.backends[here.torch_device.type]
        timed(took["first use"], lambda: reduce_some(here))
        after["in use"].append(used(here))
        del made
        one.release()
    return {
        "switch": "shim" if module is not None else "slot",
        "nccl": list(torch.cuda.nccl.version()) if here.torch_device.type == "cuda" else None,
        "seconds": {name: statistics.median(times) for name, times in took.items()},
        "memory_mb": {**memory, **after},
        "nccl_memory": stats(made_last),
        "left_mb": after["in use"][-1] - after["in use"][0],
        "abort": abort_while_busy(here, connection),
    }


def abort_while_busy(here: device.Device, connection: comm.Connection) -> dict[str, Any]:
    """Kernels are queued when the communicator is aborted from another thread; the process and its device live on."""
    if here.torch_device.type == "cuda":
        torch.cuda._sleep(2_000_000_000)
    began = time.perf_counter()
    reduce_some(here, wait=False)
    connection.abort()
    while not connection.quiet():
        pass
    aborted = time.perf_counter() - began
    here.synchronize()
    works = torch.ones(4, device=here.torch_device).sum().item() == 4
    return {"seconds": aborted, "until the device is idle": time.perf_counter() - began, "device works": works}


def stats(backend: Any) -> dict[str, int] | None:
    """ncclCommMemStats of a communicator in use, where torch (2.14) and NCCL (2.29.7) tell."""
    try:
        return dict(backend.memory_stats()) if callable(getattr(backend, "memory_stats", None)) else None
    except RuntimeError:
        return None


def reduce_some(here: device.Device, *, wait: bool = True) -> None:
    """An all-reduce of 16 MiB."""
    numbers = torch.ones(4 << 20, device=here.torch_device)
    dist.all_reduce(numbers)
    if wait:
        here.synchronize()
        assert numbers[-1].item() == 1


def used(here: device.Device) -> float:
    """MB of the device that are in use; 0 on a CPU."""
    here.synchronize()
    here.trim()
    memory = here.memory()
    return memory.device_mb if memory is not None else 0


def timed(times: list[float], call: Any) -> Any:
    """Note how long it took."""
    began = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - began)
    return result


if __name__ == "__main__":
    main()
