"""No checkpoint is written by a rehearsal, and one is read without peers. Installed in standbys only; inert once they have a rank.

``torch.save`` to a file does nothing while rehearsing, nor does ``torch.distributed.checkpoint`` when it is to save, by whichever name it
is called (``async_save`` is done at once); it reads what is there by itself. Whatever else a script writes, it has to ask
``run.rehearsing`` or TMRUN_REHEARSING. May not know: what a checkpoint is for.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

_PACKAGE = "torch.distributed.checkpoint"
_WRITE, _READ = ("save", "save_state_dict", "_save_state_dict", "async_save"), ("load", "load_state_dict")
_NO_DIST = 4
"""Place of that parameter where it has one."""


def guard(rehearsing: Callable[[], bool]) -> None:
    """Catch what writes and reads checkpoints."""
    save = torch.save

    @functools.wraps(save)
    def save_unless_rehearsing(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not rehearsing() or isinstance(f, io.BytesIO):
            save(obj, f, *args, **kwargs)

    torch.save = save_unless_rehearsing
    package = importlib.import_module(_PACKAGE)
    for part, names in (("state_dict_saver", _WRITE), ("state_dict_loader", _READ)):
        module = importlib.import_module(f"{_PACKAGE}.{part}")
        for name in names:
            original = getattr(module, name)
            instead = _alone(rehearsing, original) if names is _READ else _dropped(rehearsing, original)
            for place in (module, package):
                if hasattr(place, name):
                    setattr(place, name, instead)


def _alone(rehearsing: Callable[[], bool], original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def load_alone(*args: Any, **kwargs: Any) -> None:
        if rehearsing() and len(args) > _NO_DIST:
            args = (*args[:_NO_DIST], True, *args[_NO_DIST + 1 :])
        elif rehearsing():
            kwargs["no_dist"] = True
        original(*args, **kwargs)

    return load_alone


def _dropped(rehearsing: Callable[[], bool], original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def unless_rehearsing(*args: Any, **kwargs: Any) -> Any:
        if not rehearsing():
            return original(*args, **kwargs)
        return _done() if original.__name__ == "async_save" else None

    return unless_rehearsing


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
