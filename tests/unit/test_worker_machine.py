"""What a worker tells of the accelerators of its machine. The driver is played: its answers, and what must not be asked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tmrun.worker import coverage, device


@pytest.fixture
def two_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four devices; this process has memory on two of them."""
    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "get_device_name": lambda where: {1: "NVIDIA H100"}[where.index],
        "memory_allocated": lambda _: 0,
        "memory_reserved": lambda i: 1 << 30 if i in (1, 2, torch.device("cuda", 1)) else 0,
        "max_memory_reserved": lambda where: {1: 5 << 30}[where.index],
        "mem_get_info": lambda where: {1: (70 << 30, 80 << 30)}[where.index],
        "get_device_properties": lambda i: SimpleNamespace(uuid=f"GPU-{i}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    yield


@pytest.mark.usefixtures("two_of_four")
def test_devices_in_use_are_those_that_hold_memory() -> None:
    """The device is the one that the process's tensors are on, whichever torch takes for the present one."""
    told = coverage.machine(device.Cuda(1), 0.5, local_world=2)
    assert (told.device, told.gpus, told.gpus_used) == ("NVIDIA H100", 4, ("GPU-1", "GPU-2"))
    assert (told.memory_mb, told.peak_mb) == (80 << 10, 5 << 10)
    assert {name: told.software[name] for name in ("NCCL", "cuDNN", "CUDA")} == {"NCCL": "2.28.9", "cuDNN": "91002", "CUDA": "12.8"}


@pytest.mark.usefixtures("two_of_four")
def test_a_process_on_the_cpu_asks_nothing_of_the_gpus_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking would make a context on one of them."""
    for name in ("get_device_name", "mem_get_info", "synchronize", "max_memory_reserved", "memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asked"))
    here, meter = device.of([torch.ones(1)]), coverage.Meter()
    meter.begin(here)
    meter.end(here)
    told = coverage.machine(here, 0.5, local_world=2)
    assert (told.device, told.gpus, told.gpus_used) == ("cpu", 4, ())
    assert told.software.keys() == {"python", "torch", "tmrun"} and 0 < told.peak_mb < told.memory_mb
