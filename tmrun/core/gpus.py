"""What speaks against an accelerator: what the driver and the kernel say of it, and a short test against the job's others.

    what                                                           then
    uncorrected memory errors since its last reset                 not to be used
    rows of memory that could not be replaced                      not to be used
    rows of memory to be replaced at the next reset                the last choice
    an Xid of ``BROKEN`` in the kernel's log                       not to be used
    an Xid of ``SUSPECT``                                          the last choice
    slowed down by the hardware, or by heat                        the last choice
    as hot as where it slows down                                  the last choice
    fewer NVLinks up than the others have                          the last choice
    multiplies or copies at less than ``SLOW_SHARE`` of the median the last choice

Xids that programs cause (a wrong address, a killed process) say nothing about the device.
May not know: how it was found out, who is chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection

from tmrun.core.model import Gpu

BROKEN = {
    48: "uncorrected memory error",
    64: "rows could not be replaced",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "its processor does not answer",
    120: "its processor failed",
    140: "unrecovered memory error",
}
SUSPECT = {62: "its controller halted", 74: "NVLink error", 94: "contained memory error"}
SLOW_SHARE = 0.85
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons for a low clock that are not meant to be. Not among them: idle, and the limit of power that every busy one reaches."""

Complaint = tuple[bool, str]
"""Whether it must not be used, and why."""


def complaints(gpu: Gpu, fleet: Collection[Gpu]) -> list[Complaint]:
    """Worst first. ``fleet``: the accelerators of the job, of which only those of the same kind are compared."""
    found = [*_broken(gpu), *_suspect(gpu), *_slower(gpu, [other for other in fleet if other.kind == gpu.kind])]
    return sorted(found, key=lambda each: not each[0])


def _broken(gpu: Gpu) -> list[Complaint]:
    found = [(True, f"Xid {xid} ({BROKEN[xid]})") for xid in sorted({*gpu.xids} & BROKEN.keys())]
    if gpu.uncorrected:
        found.append((True, f"{gpu.uncorrected} uncorrected memory errors since its last reset"))
    if gpu.remap_failed:
        found.append((True, "rows of memory that cannot be replaced"))
    return found


def _suspect(gpu: Gpu) -> list[Complaint]:
    found = [(False, f"Xid {xid} ({SUSPECT[xid]})") for xid in sorted({*gpu.xids} & SUSPECT.keys())]
    if gpu.remap_pending:
        found.append((False, "rows of memory wait for a reset to be replaced"))
    if slowed := [reason for reason in gpu.throttled if reason in SLOWED]:
        found.append((False, f"slowed down: {', '.join(slowed)}"))
    if gpu.slowdown_c and gpu.temperature_c >= gpu.slowdown_c:
        found.append((False, f"{gpu.temperature_c} °C, it slows down at {gpu.slowdown_c}"))
    return found


def _slower(gpu: Gpu, alike: Collection[Gpu]) -> list[Complaint]:
    found = []
    most = max((other.links_up for other in alike), default=0)
    if 0 <= gpu.links_up < most:
        found.append((False, f"{gpu.links_up} NVLinks are up, others have {most}"))
    tests: tuple[tuple[str, str, Callable[[Gpu], float]], ...] = (
        ("multiplies", "TFLOP/s", lambda g: g.tflops),
        ("copies", "GB/s", lambda g: g.copy_gb_s),
    )
    for verb, unit, of in tests:
        rates = [of(other) for other in alike if of(other)]
        usual = statistics.median(rates) if rates else 0.0
        if 0 < of(gpu) < SLOW_SHARE * usual:
            found.append((False, f"{verb} at {of(gpu):.0f} {unit}, the job's at {usual:.0f}"))
    return found
