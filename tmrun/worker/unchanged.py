"""Whether a random number generator has been drawn from, without asking it for its state: what it is made of in memory is what it was.

Python's ``random`` gives its state as 625 numbers, numpy's as a copy, and both have to be compared with the last one: a quarter of a
millisecond, twice a step, although most scripts never draw from them there. CPython keeps both in the objects themselves, so bytes are
compared that nobody has to understand. Whether a draw shows in them is tried out once, on generators of our own; where it does not (another
Python, another numpy), the answer is always "it may have". May not know: what a state is.
"""

from __future__ import annotations

import ctypes
import random
import sys
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

_WORDS = 4 * 624
"""Bytes that a Mersenne Twister cannot do without."""
_DRAWS = 3

Traces = tuple[bytes, Any] | None
"""Equal: nothing was drawn in between. None is equal to nothing."""


def python() -> Traces:
    """Of ``random``."""
    generator = getattr(random.getstate, "__self__", None)
    return _of_python(generator) if type(generator) is random.Random and _python_shows() else None


def numpy(module: ModuleType) -> Traces:
    """Of ``numpy.random``'s global generator."""
    generator = getattr(module.random.get_state, "__self__", None)
    return _of_numpy(generator) if type(generator) is module.random.RandomState and _numpy_shows(module) else None


def _of_python(generator: Any) -> Traces:
    return _memory(generator), generator.gauss_next


def _of_numpy(generator: Any) -> Traces:
    bits = generator._bit_generator
    return (_memory(generator), _memory(bits)) if type(bits).__name__ == "MT19937" else None


def _memory(owner: Any) -> bytes:
    return bytes(_inside(owner))


@lru_cache(maxsize=8)
def _inside(owner: Any) -> memoryview:
    """All of an object but its head, in which references are counted. The object lives as long as it is remembered."""
    head = object.__basicsize__
    return memoryview((ctypes.c_ubyte * (type(owner).__basicsize__ - head)).from_address(id(owner) + head))


@cache
def _python_shows() -> bool:
    trial = random.Random(0)
    if sys.implementation.name != "cpython" or type(trial).__basicsize__ < _WORDS:
        return False
    return all(_shows(trial, _of_python, draw) for draw in (trial.random, lambda: trial.gauss(0, 1)) for _ in range(_DRAWS))


@cache
def _numpy_shows(module: ModuleType) -> bool:
    trial = module.random.RandomState(0)
    if sys.implementation.name != "cpython" or type(getattr(trial, "_bit_generator", None)).__basicsize__ < _WORDS:
        return False
    return all(_shows(trial, _of_numpy, draw) for draw in (trial.random_sample, trial.standard_normal) for _ in range(_DRAWS))


def _shows(trial: Any, traces: Any, draw: Any) -> bool:
    """Whether a draw shows, and looking does not."""
    before = traces(trial)
    same = before is not None and before == traces(trial)
    draw()
    return bool(same and before != traces(trial))
