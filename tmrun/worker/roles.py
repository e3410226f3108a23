"""Another rank for a standby that has rehearsed one: in place where ranks differ in little, else by running the script again.

In place needs three things. The script says how its own variables follow the rank (``tmrun.join(on_role=...)``). All that torch built on
the rank is the default group and DDP on it, which are made anew here: subgroups, meshes and shards of another rank are other objects.
And nothing that is named after a rank still says the old one afterwards: that is looked at, for a forgotten variable would train on
another rank's data without a word. Everything else of a rank (random states, data position, parameters) is moved to it anyway.
May not know: migrations, who decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils.data import DataLoader, Dataset, Sampler

from tmrun.worker import sandbox, suspects
from tmrun.worker.data import Batches
from tmrun.worker.process import Phase, Process, SoftRestart

_DATA = (Batches, DataLoader, Sampler, Dataset)
"""What may lie between a variable and the rank that data are chosen by."""


def take(process: Process, rank: int) -> None:
    """Become ``rank`` in place, or raise SoftRestart."""
    why = _obstacle(process, sys._getframe())
    if not why:
        why = _rebind(process, rank)
    if why:
        print(f"tmrun: rank {rank} is not taken in place: {why}; the script starts again", file=sys.stderr, flush=True)
        raise SoftRestart(rank)


def _obstacle(process: Process, frame: FrameType | None) -> str:
    """Why the script has to run again; empty: it need not."""
    if process.on_role is None:
        return "tmrun.join was given no on_role"
    world = dist.group.WORLD
    if other := [group.name for group in process.live.groups if group.pg is not world]:
        return f"there are process groups beside the default one ({len(other)})"
    if any(model.process_group is not world for model in process.state.ddps):
        return "a DistributedDataParallel has a process group of its own"
    if any(hasattr(p, "to_local") for module in process.state.modules.values() for p in module.parameters()):
        return "parameters are distributed tensors"
    if held := sorted(set(_held(process, world, frame))):
        return f"{', '.join(held)} is the default process group, which becomes another one"
    return ""


def _held(process: Process, group: Any, frame: FrameType | None) -> Iterator[str]:
    """Where the script keeps a process group, DDP aside."""
    for space in suspects.script_variables(frame):
        for name, value in list(space.items()):
            yield from (place for place, each in suspects.with_inside(name, value) if each is group)
    for name, module in process.state.modules.items():
        for path, part in module.named_modules(prefix=name):
            if not any(part is model for model in process.state.ddps):
                yield from (f"{path}.{key}" for key, value in vars(part).items() if value is group)


def _rebind(process: Process, rank: int) -> str:
    old = process.rank
    assert process.on_role is not None and process.initialise_again is not None
    process.who.become(rank)
    dist.destroy_process_group()
    process.initialise_again()
    process.phase = Phase.LOOP
    for model in process.state.ddps:
        model.process_group = c10d._get_default_group()
        if process.live.switching.needs_stand_in:
            sandbox.isolate(model)
        else:
            sandbox.connect(model)
    process.snapshots.place(rank, process.world, process.who.local_world)
    process.on_role(rank)
    for value in process.state.objects.values():
        if isinstance(value, Batches):
            value.forget()  # what it has drawn, and has begun to draw from, is the old rank's
    left = sorted(set(stale(process, old, sys._getframe())))
    return f"on_role left {', '.join(left)} at {old}" if left else ""


def stale(process: Process, old: int, frame: FrameType | None) -> Iterator[str]:
    """Names that speak of a rank and still say ``old``: of the script's variables, their attributes, and those of registered objects; of
    loaders, samplers and datasets however deep they sit."""
    for space in suspects.script_variables(frame):
        yield from _ranks(space, "", old)
        for name, value in list(space.items()):
            yield from _inside(name, value, old, set())
    for name, value in process.state.objects.items():
        yield from _inside(name, value, old, set())


def _inside(path: str, value: Any, old: int, seen: set[int]) -> Iterator[str]:
    seen.add(id(value))
    held = _attributes(value)
    yield from _ranks(held, f"{path}.", old)
    for name, inner in list(held.items()):
        listed = enumerate(inner[: suspects.FEW]) if isinstance(inner, (list, tuple)) else ()
        for place, each in [(f"{path}.{name}", inner), *((f"{path}.{name}[{i}]", item) for i, item in listed)]:
            if isinstance(each, _DATA) and id(each) not in seen:
                yield from _inside(place, each, old, seen)


def _attributes(value: Any) -> Mapping[str, Any]:
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)) else {}


def _ranks(space: Mapping[str, Any], prefix: str, old: int) -> Iterator[str]:
    """A machine's local rank does not change."""
    for name, value in list(space.items()):
        if type(value) is int and value == old and "rank" in name.lower() and "local" not in name.lower():
            yield prefix + name
