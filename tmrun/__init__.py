"""tmrun: train on, while machines leave. What a training script imports.

>>> import tmrun
>>> run = tmrun.join(model=model, optimizer=optimizer)   # doctest: +SKIP

Names are loaded on first use, so that ``tmrun --help`` never imports torch. In a worker that tmrun launched, the import itself makes the
process movable.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tmrun.worker.api import Run, Step, join
    from tmrun.worker.data import Batches

__all__ = ["Batches", "Run", "Step", "__version__", "join"]


def __getattr__(name: str) -> object:
    if name in ("Run", "Step", "join"):
        from tmrun.worker import api

        return getattr(api, name)
    if name == "Batches":
        from tmrun.worker.data import Batches

        return Batches
    raise AttributeError(f"module 'tmrun' has no attribute {name!r}")


if os.environ.get("TMRUN_WORKER_PID") == str(os.getpid()):
    from tmrun.worker.activate import activate

    activate()
