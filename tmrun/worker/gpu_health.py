"""How well this process's GPU is: what nvidia-smi and the kernel's log say of it, and a short test of its own.

Whatever cannot be found out (no nvidia-smi in a container, a kernel log that only root may read) is left out. Reading takes a moment, so a
live rank has it done beside its first steps; a standby that waits has it done again, for a GPU may break in its sleep. The test multiplies
and copies for some milliseconds, before the first step; it takes nothing from a random generator.
May not know: what is good or bad (``core.gpus``), who is told.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import torch

from tmrun.core.gpus import SLOWED, complaints
from tmrun.core.model import Gpu

_KERNEL_LOG = Path("/dev/kmsg")
_TIMEOUT_S = 20.0
_AGAIN_S = 60.0
"""How often a GPU that nobody uses is looked at."""
_SIZE = 4096
_COPIED = 64 << 20
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
Run = Callable[[list[str]], str]
"""A command -> its output. Raises OSError, subprocess.SubprocessError."""
Told = Callable[[tuple[Gpu, ...]], None]


class Probe:
    """Finds out about one GPU; ``start`` measures at once and reads in the background."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._found: tuple[Gpu, ...] = ()
        self._thread = threading.Thread(target=self._read, name="tmrun-gpu-health", daemon=True)
        self._rates = (0.0, 0.0)

    def start(self) -> Probe:
        """Begin."""
        self._rates = measure(torch.device("cuda", self._index))
        self._thread.start()
        return self

    def result(self, patience_s: float = _TIMEOUT_S) -> tuple[Gpu, ...]:
        """What was found; nothing if it takes longer."""
        self._thread.join(patience_s)
        return self._found

    @contextlib.contextmanager
    def watched(self, changed: Told) -> Iterator[None]:
        """Meanwhile, read again now and then, and say so when something else speaks against it."""
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over, changed), name="tmrun-gpu-watch", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event, changed: Told) -> None:
        self._thread.join()
        first = known = self._found
        while not over.wait(_AGAIN_S):
            self._read()
            if not over.is_set() and _against(self._found, first) != _against(known, first):
                known = self._found
                changed(known)

    def _read(self) -> None:
        properties = torch.cuda.get_device_properties(self._index)
        name = str(getattr(properties, "uuid", self._index))
        gpu = read(Gpu(name, properties.name), _output, _kernel_log())
        self._found = (replace(gpu, tflops=self._rates[0], copy_gb_s=self._rates[1]),)


def _against(now: tuple[Gpu, ...], first: tuple[Gpu, ...]) -> list[str]:
    return [why for gpu in now for _, why in complaints(gpu, first)]


def measure(device: torch.device) -> tuple[float, float]:
    """TFLOP/s of a bf16 product and GB/s of a copy, read and written; zeros where there is no memory for it."""
    try:
        one = torch.full((_SIZE, _SIZE), 1 / 3, device=device, dtype=torch.bfloat16)
        other = torch.empty_like(one)
        source = torch.ones(_COPIED, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return 0.0, 0.0
    product = _best_s(device, lambda: torch.matmul(one, one, out=other))
    copy = _best_s(device, lambda: target.copy_(source))
    return 2 * _SIZE**3 / product / 1e12, 2 * _COPIED / copy / 1e9


def _best_s(device: torch.device, call: Callable[[], object], times: int = 8) -> float:
    """Of several tries, the first of which warms up."""
    took = []
    for _ in range(times):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return min(took)


def read(gpu: Gpu, run: Run, kernel_log: Iterable[str]) -> Gpu:
    """Add what the driver and the kernel say of it."""
    bus = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ElementTree.ParseError):
        gpu, bus = from_report(gpu, run(["nvidia-smi", "-q", "-x", "-i", _smi_name(gpu.name)]))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        gpu = replace(gpu, links_up=links_up(run(["nvidia-smi", "nvlink", "-s", "-i", _smi_name(gpu.name)])))
    return replace(gpu, xids=xids(kernel_log, bus)) if bus else gpu


def _smi_name(name: str) -> str:
    return name if name.startswith("GPU-") or name.isdigit() else f"GPU-{name}"


def from_report(gpu: Gpu, report: str) -> tuple[Gpu, str]:
    """Of ``nvidia-smi -q -x``, and its bus address. Old and new spellings of a thing are both read; N/A says nothing."""
    (one,) = ElementTree.fromstring(report).iter("gpu")

    def text(path: str) -> str:
        return (one.findtext(path) or "").strip()

    def number(path: str) -> int:
        found = re.match(r"-?\d+", text(path))
        return int(found.group()) if found else 0

    volatile = one.find("ecc_errors/volatile")
    uncorrected = [e for e in (volatile if volatile is not None else []) if "_uncorrectable" in e.tag and (e.text or "").strip().isdigit()]
    active = [e.tag for e in one.iter() if re.match(r"clocks_(event|throttle)_reason_", e.tag) and (e.text or "").strip() == "Active"]
    reasons = {re.sub(r"clocks_(event|throttle)_reason_", "", tag) for tag in active}
    temperature = number("temperature/gpu_temp")
    return (
        replace(
            gpu,
            uncorrected=sum(int((e.text or "0").strip()) for e in uncorrected),
            remap_pending=text("remapped_rows/remapped_row_pending") == "Yes",
            remap_failed=text("remapped_rows/remapped_row_failure") == "Yes",
            throttled=tuple(reason for reason in SLOWED if reason in reasons),
            temperature_c=temperature,
            slowdown_c=_slowdown(temperature, text, number),
        ),
        one.get("id", ""),
    )


def _slowdown(temperature: int, text: Callable[[str], str], number: Callable[[str], int]) -> int:
    """Newer devices say how far they are from their limit, and at how much less than that they slow down."""
    if absolute := number("temperature/gpu_temp_slow_threshold"):
        return absolute
    if text("temperature/gpu_temp_tlimit").endswith("C") and text("temperature/gpu_temp_slow_tlimit_threshold").endswith("C"):
        return temperature + number("temperature/gpu_temp_tlimit") - number("temperature/gpu_temp_slow_tlimit_threshold")
    return 0


def links_up(status: str) -> int:
    """Of ``nvidia-smi nvlink -s``; -1 for a device without any."""
    links = re.findall(r"Link \d+: (.*)", status)
    return sum("inactive" not in link for link in links) if links else -1


def xids(kernel_log: Iterable[str], bus: str) -> tuple[int, ...]:
    """Of the device at this address; domains are written with four digits or eight, functions are left out or not."""
    return tuple(sorted({int(m[2]) for line in kernel_log if (m := _XID.search(line)) and _address(m[1]) == _address(bus)}))


def _address(bus: str) -> tuple[int, ...]:
    domain, number, device = bus.split(":")[:3] if bus.count(":") >= 2 else ("0", *bus.split(":")[:2])
    return int(domain, 16), int(number, 16), int(device.split(".")[0], 16)


def _output(command: list[str]) -> str:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout


def _kernel_log() -> list[str]:
    """What is in the kernel's buffer, oldest first; nothing where only root may look."""
    lines: list[str] = []
    try:
        descriptor = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return lines
    try:
        while True:
            lines.append(os.read(descriptor, 8192).decode(errors="replace"))  # one record a read
    except OSError:  # no more of them
        return lines
    finally:
        os.close(descriptor)
