"""The accelerator that a process works on, as far as a step and a switch have to know: on it, operations are queued, not done.

An aborted collective ends with garbage and without an exception, and what is queued behind it runs on. So whoever says "my gradients are
complete" (the vote) first waits until everything queued has run, and then looks whether anything was aborted meanwhile; whoever puts
state back, or sends it, waits in the same way. Every stream counts: torch does not show those that collectives run on.
May not know: steps, collectives.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

_MB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Megabytes: in tensors, kept by torch (tensors included), in use on the whole device by whomever; the most that torch ever kept, and
    what the whole device has. 0: not known."""

    allocated_mb: int
    reserved_mb: int
    device_mb: int
    peak_mb: int = 0
    total_mb: int = 0


class Device(Protocol):
    """See the module's text."""

    torch_device: torch.device

    def use(self) -> None:
        """Work on it in this thread."""

    def synchronize(self) -> None:
        """Return when everything queued on it has run. Raises RuntimeError when something of it failed."""

    def trim(self) -> None:
        """Give back what torch keeps for later tensors."""

    def memory(self) -> Memory | None:
        """What is taken of it; None: there is nothing to tell."""

    def taken(self) -> int:
        """Bytes that this process ever took; never falls, and grows when what was given back is taken anew."""

    def clock(self) -> float:
        """Seconds of work, from any start: when everything queued before has run. Raises RuntimeError like ``synchronize``."""


class Cpu:
    """Nothing is queued."""

    torch_device = torch.device("cpu")

    def use(self) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """All is done."""

    def trim(self) -> None:
        """Nothing to do."""

    def memory(self) -> Memory | None:
        """The process's own memory is told elsewhere."""
        return None

    def taken(self) -> int:
        """The process's highest, for nothing is given back."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def clock(self) -> float:
        """This thread's CPU: a rehearsal gives way to everything else on its machine."""
        return time.thread_time()


class Cuda:
    """One GPU."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)

    def use(self) -> None:
        """See ``Device``."""
        torch.cuda.set_device(self.torch_device)

    def synchronize(self) -> None:
        """See ``Device``. Lets other threads run meanwhile."""
        torch.cuda.synchronize(self.torch_device)

    def trim(self) -> None:
        """See ``Device``."""
        torch.cuda.empty_cache()

    def memory(self) -> Memory:
        """See ``Device``."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allocated, reserved = torch.cuda.memory_allocated(self.torch_device), torch.cuda.memory_reserved(self.torch_device)
        peak = torch.cuda.max_memory_reserved(self.torch_device)
        return Memory(allocated // _MB, reserved // _MB, (total - free) // _MB, peak // _MB, total // _MB)

    def taken(self) -> int:
        """See ``Device``."""
        return int(torch.cuda.memory_stats(self.torch_device).get("reserved_bytes.all.allocated", 0))

    def clock(self) -> float:
        """See ``Device``."""
        self.synchronize()
        return time.monotonic()


def of(tensors: Iterable[torch.Tensor], queues: Collection[str] = ()) -> Device:
    """Where a process's tensors are, else where its collectives are queued (``queues``: types of devices), as when a state is kept on the
    CPU between its uses; else the CPU, even if there is a GPU. For the main thread: each has a present device of its own."""
    index = next((t.device.index for t in tensors if t.device.type == "cuda"), None)
    if index is None and "cuda" in queues:
        index = _present_gpu()
    return Cpu() if index is None else Cuda(index)


def _present_gpu() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def is_sticky(device: Device) -> bool:
    """After a synchronisation failed: whether the process has lost the device for good, as after an illegal access."""
    try:
        device.synchronize()
    except RuntimeError:
        return True
    return False
