"""CUDA graphs that have collectives in them are refused: replayed, they use the communicators that they were captured with.

Nobody could tell such a graph that its communicator was replaced; it would wait for a peer that has gone, or reach freed memory. Graphs
of computation alone are fine, those of torch.compile too: state is moved in place, so addresses stay. A script that captures backward
passes has gradients that are written without one (``gradients``); torch.compile captures parts of them only.

CUDA forbids some calls to all threads while one captures. NCCL lifts that around its own allocations, but that is its business; so what
is prepared beside training and a capture take turns: whoever initialises waits for a capture to end, and gives up if it does not; a
capture waits for what is being initialised, but not for long, for that may hang on a lost peer. May not know: what a graph is for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tmrun.core.errors import WorkerError

_HELD_S = 10.0
"""How long a capture is held back."""


class _Turns:
    """Who is at it: one capture, or any number of initialisations."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._capturing, self._initialising = False, 0
        self.backwards = 0
        """Backward passes that began in a capture."""

    def backward(self) -> None:
        """One begins."""
        self.backwards += self._capturing

    def capture(self, on: bool) -> None:
        """It begins, as soon as it may; or has ended."""
        with self._changed:
            if on:
                self._changed.wait_for(lambda: not self._initialising, _HELD_S)
            self._capturing = on
            self._changed.notify_all()

    @contextlib.contextmanager
    def initialise(self, timeout_s: float) -> Iterator[None]:
        """Around it."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._capturing, timeout_s):
                raise WorkerError(f"a CUDA graph has been captured for {timeout_s:g} s, in which no communicator can be initialised")
            self._initialising += 1
        try:
            yield
        finally:
            with self._changed:
                self._initialising -= 1
                self._changed.notify_all()


_turns = _Turns()
apart_from_captures = _turns.initialise
note_backward = _turns.backward


def guard(called: Callable[[], int]) -> None:
    """Watch every capture of the process. ``called``: how often its groups were told to communicate so far."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end
    before = [0]

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        _turns.capture(True)
        before[0] = called()
        try:
            begin(self, *args, **kwargs)
        except BaseException:
            _turns.capture(False)
            raise

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        try:
            end(self)
        finally:
            _turns.capture(False)
        if called() != before[0]:
            raise WorkerError(
                "a CUDA graph was captured with collectives in it, which would use the present communicators for ever; capture computation "
                "only (with torch.compile: no mode that makes CUDA graphs around collectives)"
            )

    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def captured_backwards() -> int:
    """How many backward passes this process has captured: a replay writes the gradients of each, and nobody sees it."""
    return _turns.backwards
