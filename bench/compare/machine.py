"""What the machine is, and how busy it is before a trial."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    """Stays the same; no names of hosts or people."""

    cores: int
    cpu: str
    memory_gb: int
    kernel: str
    python: str

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)

    @staticmethod
    def load() -> float:
        """Load average of the last minute."""
        return round(os.getloadavg()[0], 2)


def this_machine() -> Machine:
    """Look."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kernel = platform.release().split("-")[0]
    return Machine(len(os.sched_getaffinity(0)), cpu, round(memory / 2**30), kernel, platform.python_version())


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores that was busy for so long, 0 to 1: with nothing of the bench running, what others do."""
    idle_before, all_before = _ticks()
    time.sleep(seconds)
    idle, total = _ticks()
    return round(1 - (idle - idle_before) / max(1, total - all_before), 3)


def _ticks() -> tuple[int, int]:
    """(idle, all) of /proc/stat."""
    values = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return values[3] + values[4], sum(values)
