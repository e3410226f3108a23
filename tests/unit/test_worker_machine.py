"""What a worker tells of the accelerators of its machine. The driver is played: its answers, and what must not be asked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tmrun.worker import coverage


@pytest.fixture
def two_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four devices; this process has memory on two of them."""
    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "current_device": lambda: 1,
        "get_device_name": lambda: "NVIDIA H100",
        "memory_reserved": lambda i: 1 << 30 if i in (1, 2) else 0,
        "max_memory_reserved": lambda: 5 << 30,
        "get_device_properties": lambda i: SimpleNamespace(uuid=f"GPU-{i}", total_memory=80 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    coverage._on_gpu.cache_clear()
    yield
    coverage._on_gpu.cache_clear()


@pytest.mark.usefixtures("two_of_four")
def test_devices_in_use_are_those_that_hold_memory() -> None:
    told = coverage.machine(0.5, local_world=2)
    assert (told.device, told.gpus, told.gpus_used) == ("NVIDIA H100", 4, ("GPU-1", "GPU-2"))
    assert (told.memory_mb, told.peak_mb) == (80 << 10, 5 << 10)


def test_a_machine_without_any() -> None:
    told = coverage.machine(0.5, local_world=2)
    assert (told.device, told.gpus, told.gpus_used) == ("cpu", 0, ())
