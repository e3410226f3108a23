"""What a rehearsal warmed, what was still cold in the first step after it, and what machine this is.

Cold is what happens in a joiner's first live step and did not while it rehearsed: graphs compiled, kinds of collectives called, memory
taken from the device (of the process, without a GPU). May not know: who is told.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tmrun
from tmrun.core.model import Gpu, Machine, Rehearsal
from tmrun.worker.device import Device, Memory
from tmrun.worker.record import Replay, name_of

_MB = 1 << 20
_DRIVER = Path("/proc/driver/nvidia/version")


class Meter:
    """Times rehearsed steps, by the device's clock, and counts what is compiled."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._began = 0.0
        self._graphs = graphs()

    def begin(self, here: Device) -> None:
        """A step begins."""
        self._began = here.clock()

    def end(self, here: Device) -> None:
        """It is done."""
        self._steps.append(here.clock() - self._began)

    @property
    def compiled(self) -> int:
        """Graphs, since this was made."""
        return graphs() - self._graphs

    @property
    def step_s(self) -> float:
        """Median, without the first, in which everything is made; 0 if there was no other."""
        return statistics.median(self._steps[1:]) if self._steps[1:] else 0.0


def rehearsal(rank: int, seconds: float, steps: int, replay: Replay, meter: Meter, memory: Memory | None) -> Rehearsal:
    """The report of a rehearsal that is over. ``memory``: what the process waits with."""
    waiting = {"tensors": memory.allocated_mb, "kept": memory.reserved_mb, "device": memory.device_mb} if memory else {}
    return Rehearsal(rank, seconds, steps, replay.replayed, dict(replay.synthesised), meter.compiled, waiting)


def machine(here: Device, step_s: float, local_world: int, health: tuple[Gpu, ...] = ()) -> Machine:
    """This process's machine: the device that it works on, though there may be GPUs beside it."""
    software = {"python": platform.python_version(), "torch": torch.__version__, "tmrun": tmrun.__version__}
    count = torch.cuda.device_count()  # makes no context
    if (memory := here.memory()) is not None:
        name = torch.cuda.get_device_name(here.torch_device)
        software |= _libraries()
        return Machine(name, _driver(), software, memory.total_mb, memory.peak_mb, step_s, count, _gpus_used(), health)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world
    return Machine("cpu", "", software, total // _MB, here.taken() // _MB, step_s, count)


def _libraries() -> dict[str, str]:
    """Of NVIDIA, as torch loaded them; those that are there."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    cudnn = str(torch.backends.cudnn.version() or "")
    found = {"NCCL": nccl, "cuDNN": cudnn, "CUDA": torch.version.cuda or ""}
    return {name: version for name, version in found.items() if version}


@dataclass
class _Before:
    graphs: int
    memory: int


class FirstStep:
    """Listens to a joiner's first live step."""

    def __init__(self, replay: Replay, here: Device) -> None:
        self._known = set(replay.called)
        self._here = here
        self._before: _Before | None = None
        self._new: set[str] = set()

    def begin_step(self) -> None:
        """It begins, perhaps again: what switching and the state's arrival took is no part of it."""
        if self._before is None:
            self._before = _Before(graphs(), self._here.taken())

    def run(self, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a collective."""
        if name_of(call) not in self._known:
            self._new.add(name_of(call))
        return call(*args, **kwargs)

    def cold(self) -> dict[str, int]:
        """What was cold, by kind; kinds that were not are left out."""
        assert self._before is not None
        found = {
            "compiled graphs": graphs() - self._before.graphs,
            "MB of memory": (self._here.taken() - self._before.memory) // _MB,
            **{f"collective {name}": 1 for name in self._new},
        }
        return {kind: count for kind, count in found.items() if count > 0}


def _gpus_used() -> tuple[str, ...]:
    """Those on which this process has memory. Asking makes no context on the others."""
    held = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(i)]
    return tuple(str(getattr(torch.cuda.get_device_properties(i), "uuid", i)) for i in held)


def _driver() -> str:
    """Of NVIDIA; empty where there is none."""
    found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.exists() else None
    return found.group() if found else ""


def graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
