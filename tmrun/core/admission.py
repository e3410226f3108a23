"""Whether a warm standby is fit for this job: its machine, as its rehearsal found it, against those that train.

    what differs                                         verdict
    torch or tmrun of another version                    refused   layouts, numbers and messages may differ: not the same program
    NCCL of another version                              refused   it does not connect to others
    less memory than a training worker has used          refused   it would die in the first step
    an accelerator that is broken                        refused   ``gpus``
    one that is not well                                 last      ``gpus``
    another device, driver, CUDA, cuDNN or Python        last      it can do the work, though results may differ in the last bit
    its rehearsed step takes over twice the job's step   last      a rehearsal does not wait for anybody, so this is the machine
    nothing, or nothing is known yet                     fit

``last``: chosen when no fit standby is left, and told all the same. The thresholds are here and nowhere else.
May not know: how the facts were gathered, when somebody is chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from tmrun.core import gpus
from tmrun.core.model import Machine

SLOW = 2.0
"""A rehearsed step this many times as long as the job's is slow."""
NOTICEABLE_S = 0.02
"""Smaller differences of a step are noise."""
COMPARED = 64
"""Machines whose accelerators a standby's are compared with: enough for a median."""
SAME_PROGRAM = ("torch", "tmrun", "NCCL")


class Fit(IntEnum):
    """How a standby is chosen, best first."""

    FIT = 0
    LAST = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """``why`` is empty for one that is fit."""

    fit: Fit
    why: str = ""


def judge(standby: Machine | None, live: Iterable[Machine | None]) -> Verdict:
    """The verdict on a standby, compared with the machines of the live slots as far as they are known."""
    known = [m for m in live if m is not None] if standby is not None else []
    if standby is None:
        return Verdict(Fit.FIT)
    return _refusal(standby, known) or _reservation(standby, known) or Verdict(Fit.FIT)


def _refusal(standby: Machine, live: Sequence[Machine]) -> Verdict | None:
    for name in SAME_PROGRAM:
        theirs = _seen(live, lambda m, name=name: m.software.get(name, ""))  # type: ignore[misc]
        if standby.software.get(name) and theirs and standby.software[name] not in theirs:
            return Verdict(Fit.REFUSED, f"{name} {standby.software[name]}, the job has {', '.join(theirs)}")
    needed = max((m.peak_mb for m in live), default=0)
    if 0 < standby.memory_mb < needed:
        return Verdict(Fit.REFUSED, f"{standby.memory_mb} MB for a worker, the job's workers have used {needed} MB")
    return next((Verdict(Fit.REFUSED, why) for broken, why in _ailments(standby, live) if broken), None)


def _ailments(standby: Machine, live: Sequence[Machine]) -> list[gpus.Complaint]:
    if not standby.health:
        return []
    fleet = [gpu for machine in live[:COMPARED] for gpu in machine.health]
    found = [(broken, f"GPU {gpu.name}: {why}") for gpu in standby.health for broken, why in gpus.complaints(gpu, fleet)]
    return sorted(found, key=lambda each: not each[0])


def _reservation(standby: Machine, live: Sequence[Machine]) -> Verdict | None:
    aspects: tuple[tuple[str, Callable[[Machine], str]], ...] = (
        ("", lambda m: m.device),
        ("driver ", lambda m: m.driver),
        ("CUDA ", lambda m: m.software.get("CUDA", "")),
        ("cuDNN ", lambda m: m.software.get("cuDNN", "")),
        ("Python ", lambda m: m.software.get("python", "")),
    )
    for what, of in aspects:
        mine, theirs = of(standby), _seen(live, of)
        if mine and theirs and mine not in theirs:
            return Verdict(Fit.LAST, f"{what}{mine}, the job has {', '.join(theirs)}")
    if ailments := _ailments(standby, live):
        return Verdict(Fit.LAST, ailments[0][1])
    steps = [m.step_s for m in live if m.step_s]
    usual = statistics.median(steps) if steps else 0.0
    if usual and standby.step_s > SLOW * usual and standby.step_s - usual > NOTICEABLE_S:
        return Verdict(Fit.LAST, f"slow: a rehearsed step took {standby.step_s:.2f} s, the job's takes {usual:.2f} s")
    return None


def _seen(live: Sequence[Machine], of: Callable[[Machine], str]) -> list[str]:
    return sorted({of(m) for m in live} - {""})


def weakest(machines: Sequence[Machine]) -> Machine:
    """A node as its weakest worker sees it; at least one. Its accelerators are those of all: each may see only its own."""
    used = tuple(sorted({gpu for m in machines for gpu in m.gpus_used}))
    return replace(
        machines[0],
        gpus=max(len(used), *(m.gpus for m in machines)),
        gpus_used=used,
        health=tuple({gpu.name: gpu for m in machines for gpu in m.health}.values()),
        memory_mb=min(m.memory_mb for m in machines),
        peak_mb=max(m.peak_mb for m in machines),
        step_s=max(m.step_s for m in machines),
    )
