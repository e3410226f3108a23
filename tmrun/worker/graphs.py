"""CUDA graphs that have collectives in them are refused: replayed, they use the communicators that they were captured with.

Nobody could tell such a graph that its communicator was replaced; it would wait for a peer that has gone, or reach freed memory. Graphs
of computation alone are fine, those of torch.compile too: state is moved in place, so addresses stay. A capture is not disturbed by what
is prepared beside it either: whoever prepares waits for it to end. May not know: what a graph is for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from tmrun.core.errors import WorkerError

_idle = threading.Event()
_idle.set()


def guard(started: Callable[[], int]) -> None:
    """Watch every capture of the process. ``started``: collectives started so far."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end
    before = [0]

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        before[0] = started()
        _idle.clear()
        try:
            begin(self, *args, **kwargs)
        except BaseException:
            _idle.set()
            raise

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        try:
            end(self)
        finally:
            _idle.set()
        if started() != before[0]:
            raise WorkerError(
                "a CUDA graph was captured with collectives in it, which would use the present communicators for ever; capture computation "
                "only (with torch.compile: no mode that makes CUDA graphs around collectives)"
            )

    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def wait_for_capture(timeout_s: float) -> bool:
    """Return when nothing is being captured: whatever allocates on the device from another thread would break it. False: too long."""
    return _idle.wait(timeout_s)
