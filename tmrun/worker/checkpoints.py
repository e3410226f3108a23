"""No checkpoint is written by a rehearsal, and one is read without peers. Installed in standbys only; inert once they have a rank.

``torch.save`` to a file and ``torch.distributed.checkpoint.save`` do nothing while rehearsing (``async_save`` is done at once);
``torch.distributed.checkpoint.load`` reads what is there by itself. Whatever else a script writes, it has to ask ``run.rehearsing`` or
TMRUN_REHEARSING. May not know: what a checkpoint is for.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch


def guard(rehearsing: Callable[[], bool]) -> None:
    """Catch what writes and reads checkpoints."""
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    save, load = torch.save, checkpoint.load

    @functools.wraps(save)
    def save_unless_rehearsing(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not rehearsing() or isinstance(f, io.BytesIO):
            save(obj, f, *args, **kwargs)

    @functools.wraps(load)
    def load_alone(*args: Any, **kwargs: Any) -> None:
        load(*args, **{**kwargs, "no_dist": True} if rehearsing() else kwargs)

    torch.save = save_unless_rehearsing
    checkpoint.load = load_alone
    checkpoint.save = _dropped(rehearsing, checkpoint.save, lambda: None)
    checkpoint.async_save = _dropped(rehearsing, checkpoint.async_save, _done)


def _dropped(rehearsing: Callable[[], bool], original: Callable[..., Any], instead: Callable[[], Any]) -> Any:
    @functools.wraps(original)
    def unless_rehearsing(*args: Any, **kwargs: Any) -> Any:
        return instead() if rehearsing() else original(*args, **kwargs)

    return unless_rehearsing


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
