"""What looks like training state that nobody registered: its successor would silently hold garbage.

Looked at once, when the loop begins: attributes of the registered objects, and the variables of the script's functions and modules that
are running, one level of plain objects and of the first items of containers deep. A module is suspicious when it has a parameter that no
registered module has (a wrapper around a registered one is fine), an optimizer when its state is not that of a registered one.
May not know: what happens to registered objects.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

import torch

from tmrun.worker.state import State

FEW = 64
"""So many items of a container are looked at: it may hold all samples, or read each from a file."""
_SKIPPED = ("tmrun.", "torch.", "runpy", "importlib")


def script_variables(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """Variables of a frame and its callers, the script's only."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_SKIPPED):
            yield frame.f_locals
        frame = frame.f_back
    yield vars(sys.modules["__main__"])


def find(state: State, namespaces: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of optimizers and modules that are not registered, each once."""
    parameters = {id(p) for module in state.modules.values() for p in module.parameters()}
    states = {id(optimizer.state) for optimizer in state.optimizers.values()}
    seen = {id(o) for o in (*state.modules.values(), *state.optimizers.values(), *state.objects.values())}
    own = (pair for name, owner in _registered(state) for pair in _inside(name, owner))
    script = (pair for space in namespaces for key, top in list(space.items()) for pair in with_inside(key, top))
    found = []
    for name, value in itertools.chain(own, script):
        if id(value) not in seen:
            seen.add(id(value))
            if _suspicious(value, parameters, states):
                found.append(f"{name} ({type(value).__name__})")
    return found


def steps_for(state: State, optimizer: Any) -> bool:
    """Whether an optimizer is registered, or the inner one of something that is."""
    return any(optimizer is owner or any(optimizer is inner for inner in _attributes(owner)) for _, owner in _registered(state))


def _registered(state: State) -> list[tuple[str, Any]]:
    return [*state.modules.items(), *state.optimizers.items(), *state.objects.items()]


def _suspicious(value: Any, parameters: set[int], states: set[int]) -> bool:
    if isinstance(value, torch.optim.Optimizer):
        return id(value.state) not in states  # the inner one of a wrapper has the same
    return isinstance(value, torch.nn.Module) and any(id(p) not in parameters for p in value.parameters())


def with_inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value, and what it holds one level deep (of a container the first items), each with its place."""
    yield name, value
    yield from _inside(name, value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in [*itertools.islice(value.items(), FEW)])
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(itertools.islice(value, FEW)))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, torch.nn.Module)):
        yield from ((f"{name}.{key}", item) for key, item in list(vars(value).items()))


def _attributes(value: Any) -> list[Any]:
    return list(vars(value).values()) if hasattr(value, "__dict__") else []
