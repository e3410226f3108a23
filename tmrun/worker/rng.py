"""Random number generators: capture and restore all that a step may draw from.

torch on the CPU, torch on every CUDA device in use, Python's ``random``, numpy's legacy global (if numpy is imported). Generators
that a script made itself (torch.Generator, random.Random, numpy's Generator) travel if they are registered: ``stateful`` gives them
``state_dict`` and ``load_state_dict``. May not know: when this is needed.
"""

from __future__ import annotations

import array
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from tmrun.worker import unchanged, values

Captured = dict[str, Any]
"""The state of every generator by its name, as the library itself gives it: quick to take and to put back in this process."""


@dataclass
class _Last:
    """What was captured and encoded last, and is given again while nobody draws: twice a step, everything that is not done counts."""

    python: Any = None
    numpy: Any = None
    traces: dict[str, unchanged.Traces] = field(default_factory=dict)
    encoded: dict[str, tuple[Any, bytes]] = field(default_factory=dict)


_LAST = _Last()


def capture() -> Captured:
    """The state of all generators."""
    state: Captured = {"torch": torch.get_rng_state(), "python": _capture_python()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state["numpy"] = _capture_numpy(numpy)
    return state


def _capture_python() -> Any:
    if _drawn("python", unchanged.python()):
        state = random.getstate()
        if state != _LAST.python:
            _LAST.python = state
    return _LAST.python


def _capture_numpy(numpy: ModuleType) -> Any:
    if _drawn("numpy", unchanged.numpy(numpy)):
        state, last = numpy.random.get_state(), _LAST.numpy
        if last is None or state[0] != last[0] or state[2:] != last[2:] or not numpy.array_equal(state[1], last[1]):
            _LAST.numpy = state
    return _LAST.numpy


def _drawn(name: str, traces: unchanged.Traces) -> bool:
    """Whether a generator may have been drawn from since we looked last."""
    before, _LAST.traces[name] = _LAST.traces.get(name), traces
    return traces is None or traces != before


def restore(state: Captured) -> None:
    """Continue every captured generator where it was."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])


def encode(state: Captured) -> dict[str, bytes]:
    """For another process: one part a generator."""
    return {name: _encoded(name, value) for name, value in state.items()}


def _encoded(name: str, value: Any) -> bytes:
    last = _LAST.encoded.get(name)
    if last is None or last[0] is not value:
        last = _LAST.encoded[name] = value, values.encode(_PLAIN[name](value))
    return last[1]


def _plain_python(state: Any) -> Any:
    version, words, gauss = state
    return version, array.array("Q", words).tobytes(), gauss


def _plain_numpy(state: Any) -> Any:
    name, keys, position, has_gauss, cached = state
    return name, keys.tobytes(), int(position), int(has_gauss), float(cached)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "torch": values.tensor_bytes,
    "python": _plain_python,
    "cuda": list,
    "numpy": _plain_numpy,
}


def decode(parts: Mapping[str, bytes]) -> Captured:
    """The inverse of ``encode``."""
    state: Captured = {name: values.decode(part) for name, part in parts.items()}
    state["torch"] = _tensor(state["torch"])
    version, words, gauss = state["python"]
    state["python"] = (version, tuple(array.array("Q", words)), gauss)
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        state["numpy"] = (name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, cached)
    return state


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


class _Torch:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": values.tensor_bytes(self._generator.get_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(_tensor(state["state"]))


class _Python:
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.setstate(state["state"])


class _Numpy:
    def __init__(self, generator: Any) -> None:
        self._bits = generator.bit_generator

    def state_dict(self) -> dict[str, Any]:
        return dict(self._bits.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bits.state = state


def stateful(value: Any) -> Any:
    """The value, or something that gives a random number generator ``state_dict`` and ``load_state_dict``."""
    if isinstance(value, torch.Generator):
        return _Torch(value)
    if isinstance(value, random.Random):
        return _Python(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random") and isinstance(value, numpy.random.Generator):
        return _Numpy(value)
    return value
