"""The middle of ``optimizer.step()``: half of Adam's parameters are updated, the others not yet.

What happens there is named by TMRUN_TEST_HALFWAY, entries ``rank:step:what``: ``die``, or ``told``, to wait until the process is told that
another rank was lost.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch.optim.adam as adam

from tmrun.worker.current import HOLDER

ENV = "TMRUN_TEST_HALFWAY"
_PATIENCE_S = 60


def install() -> None:
    """After ``tmrun.join``. Nothing outside tmrun, nor for who rehearses: its turn is over."""
    runtime: Any = HOLDER.runtime
    entries = [entry.split(":") for entry in os.environ.get(ENV, "").split(",") if entry]
    mine = {int(step): what for rank, step, what in entries if rank == os.environ.get("RANK")}
    if runtime is None or runtime.sandboxed or not mine:
        return
    plain = adam._single_tensor_adam

    def in_halves(*lists: Any, **options: Any) -> None:
        """The first six arguments are lists with one entry for each parameter (or none at all)."""
        parameters, half = lists[0], len(lists[0]) // 2
        before, after = [each[:half] for each in lists[:6]], [each[half:] for each in lists[:6]]
        plain(*before, *lists[6:], **options)
        _happen(runtime, mine.pop(runtime._open.number, ""), half, parameters)
        plain(*after, *lists[6:], **options)

    adam._single_tensor_adam = in_halves


def _happen(runtime: Any, what: str, half: int, parameters: Sequence[Any]) -> None:
    if what:
        print(f"rank {runtime.rank} has updated {half} of {len(parameters)} parameters: {what}", flush=True)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "told":
        live, board = runtime._process.live, runtime._process.board
        deadline = time.monotonic() + _PATIENCE_S
        while not (live.lost and board.failure is not None):
            assert time.monotonic() < deadline, "nobody tells of a loss"
            time.sleep(0.001)
        with live.lock:  # all connections are cut
            pass
