"""Stands in for torch's ProcessGroupNCCL, at exactly that boundary: torch's own code makes it, registers it, and calls it from C++.

Underneath is gloo, so ``cpu:nccl`` really communicates, and in ``cpu:gloo,cuda:nccl`` the second backend is there without a GPU. It refuses
a device that it does not serve, and what is under way when it is aborted ends without an error, as NCCL's does. What is done to every
communicator is written to the folder TEST_NCCL_LOG, a file a process: one JSON line [time, communicator, what, members].
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tmrun import wire
from tmrun.worker import comm_gloo, device, gpu_health, nccl_environment

UNDEFINED = -(2**31)
_serial = itertools.count()
_alive: list[Any] = []
"""What only C++ holds comes back from it as plain gloo."""


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(blocking=UNDEFINED, min_ctas=UNDEFINED, max_ctas=UNDEFINED, split_share=UNDEFINED, net_name=None)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: Any = None
        self.split_color = 0


class Queued:
    """An operation on a device: it can be asked whether it has run, and an abort ends it, with garbage and without an error."""

    def __init__(self, work: dist.Work, aborted: threading.Event | None = None) -> None:
        self._work, self._aborted, self._over = work, aborted or threading.Event(), threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._work.wait(timedelta(days=1))
        except RuntimeError as error:
            self._error = error
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set() or self._aborted.is_set()

    def wait(self, timeout: timedelta = timedelta(days=1)) -> bool:
        end = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            assert time.monotonic() < end, "nobody waits so long"
            time.sleep(0.001)
        if self._error is not None and not self._aborted.is_set():
            raise self._error
        return True


class FakeNccl(dist.ProcessGroupGloo):
    Options = Options
    serves = "cuda"

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert options.split_from is None, "a communicator that belongs to another one"
        if wire.ENV_SOCKET in os.environ:
            assert all(os.environ[k] == v for k, v in nccl_environment.FORCED.items()), "torch's watchdog would end this process"
        with comm_gloo.Opened() as self._opened:
            super().__init__(store, rank, size, options._timeout)
        self.serial, self.made_with, self._members = next(_serial), options, size
        self._aborted = threading.Event()
        _alive.append(self)
        note(self, "made")

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        if device is None or device.type != self.serves:
            raise RuntimeError(f"CUDAGuardImpl initialized with non-CUDA DeviceType: {device}")
        note(self, f"initialised on {device}")

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Only when called from Python: tmrun moves a state."""
        note(self, "sends")
        return self._queue(lambda: super(FakeNccl, self).send(tensors, rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        note(self, "receives")
        return self._queue(lambda: super(FakeNccl, self).recv(tensors, rank, tag))

    def _queue(self, call: Callable[[], dist.Work]) -> Queued:
        if self._aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        return Queued(call(), self._aborted)

    def abort(self) -> None:
        time.sleep(0.1)  # as long as it takes NCCL
        self._aborted.set()
        self._opened.made.abort()
        note(self, "aborted")

    def perform_nocolor_split(self, device: torch.device) -> None:
        raise AssertionError("a communicator that belongs to another one")


class StandIn(device.Cpu):
    """A GPU on which nothing is ever under way."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)


class NoProbe:
    """Nothing is known of its health."""

    def __init__(self, index: int) -> None:
        pass

    def start(self) -> None:
        return None


def install(backend: str) -> None:
    """As if torch had been built with NCCL; for a backend like ``cpu:gloo,cuda:nccl`` with a GPU."""
    c10d.ProcessGroupNCCL = FakeNccl  # type: ignore[misc]
    c10d._NCCL_AVAILABLE = True
    if "cuda" in backend:
        device._present_gpu, device.Cuda = lambda: 0, StandIn  # type: ignore[assignment, misc]
        gpu_health.Probe = NoProbe  # type: ignore[assignment, misc]
    else:
        FakeNccl.serves = "cpu"


def note(backend: Any, what: str) -> None:
    folder = os.environ.get("TEST_NCCL_LOG")
    if folder:
        with open(Path(folder) / f"{os.getpid()}.txt", "a") as log:
            serial, members = (backend.serial, backend._members) if backend is not None else (-1, 0)
            log.write(json.dumps([time.monotonic(), serial, what, members]) + "\n")


def notes(folder: Path, pid: int) -> list[tuple[float, int, str, int]]:
    """What a process wrote."""
    return [tuple(json.loads(line)) for line in (folder / f"{pid}.txt").read_text().splitlines()]
