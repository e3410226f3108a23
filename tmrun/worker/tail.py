"""The rest of a step's block after its vote: it has to run to its end, whoever is lost meanwhile.

Communication that a lost rank breaks there is skipped, and what it reports is garbage. That does no harm to a number that is printed; a
parameter that is made from it would differ from rank to rank, and nobody would notice. So once something was skipped,

    another update                  is refused (two networks that train in turns, an optimizer that communicates inside ``step``, or is
                                    stepped in the middle of backward)
    a parameter changed by hand     after it, or given to a collective of the tail, is refused (an average of parameters)

What else is made from it (a learning rate from a mean loss, a buffer) is not seen. In the first step of a job a script of the first kind
is told of it beforehand. May not know: how it is skipped, votes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from tmrun.core.errors import WorkerError
from tmrun.worker import values
from tmrun.worker.process import Process
from tmrun.worker.state import local

_REMEDY = "finish communication before the first optimizer.step() of a step, or make it two steps"


class Tail:
    """Of one step, from the moment its vote passed."""

    def __init__(self, process: Process, number: int) -> None:
        self._process, self._number = process, number
        self._hidden = process.live.hidden
        self._started = process.live.started if process.rank == 0 and process.counters.done == 0 else None
        self._skipped = 0
        self._seen: list[tuple[int, int, int]] | None = None
        """Of every parameter, when the script first communicated, what shows most changes."""
        self._contents: list[bytes] | None = None
        """... and what shows all, when something was first skipped."""
        self._given: list[int] = []
        """Where the memory is that the script's collectives worked on."""
        self._hooks: list[RemovableHandle] = []
        if process.live.groups.poisoned:
            self._hear_gradients()

    @contextmanager
    def collective(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around a collective of the script, which may be skipped from C++ on."""
        self._note(args, kwargs)
        hidden = self._process.live.hidden
        try:
            yield
        finally:
            if self._process.live.hidden != hidden:
                self.skip()

    def skip(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """A collective with these arguments is skipped."""
        self._note(args, kwargs)
        self._skipped += 1
        self._hear_gradients()
        if self._contents is None:
            self._contents = self._digests()
            what = f"tmrun: rank {self._process.rank}: a rank was lost after step {self._number} had counted"
            text = "communication in the rest of the step is skipped, what it reports there is not valid"
            print(f"{what}; {text}", file=sys.stderr, flush=True)

    def _note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._seen is None:
            self._seen = self._signs()
        self._given += [_address(tensor) for tensor in _tensors((*args, *kwargs.values()))]

    def update(self) -> None:
        """An optimizer is about to update again, or has updated. Raises WorkerError if that rests on skipped communication."""
        if self._is_broken():
            raise half_step(self._number, "an optimizer updates with what was not communicated")
        if self._started is not None and self._process.live.started != self._started:
            self._started = None
            _warn(self._number)

    def end(self) -> None:
        """The block is over. Raises WorkerError if skipped communication went into parameters."""
        while self._hooks:
            self._hooks.pop().remove()
        if not self._is_broken():
            return
        if self._contents not in (None, self._digests()) or self._seen not in (None, self._signs()):
            raise half_step(self._number, "parameters were changed after a collective that was skipped")
        if {_address(p) for p in self._process.state.trained()}.intersection(self._given) - {0}:
            raise half_step(self._number, "a collective on parameters was skipped")

    def _is_broken(self) -> bool:
        return self._skipped > 0 or self._process.live.hidden != self._hidden

    def _signs(self) -> list[tuple[int, int, int]]:
        return [(p._version, _local(p)._version, _local(p).data_ptr()) for p in self._process.state.trained()]

    def _digests(self) -> list[bytes]:
        return [hashlib.blake2b(values.tensor_bytes(local(p)), digest_size=16).digest() for p in self._process.state.trained()]

    def _hear_gradients(self) -> None:
        """DDP reduces from C++, which with the slot nobody sees: a gradient from here on counts as skipped communication."""

        def skipped(_: torch.Tensor) -> None:
            self._skipped += 1

        if not self._hooks:
            parameters = {id(p): p for model in self._process.state.ddps for p in model.parameters() if p.requires_grad}
            self._hooks = [p.register_post_accumulate_grad_hook(skipped) for p in parameters.values()]


def half_step(number: int, what: str) -> WorkerError:
    """Nothing can be done about it: other ranks may have, or may not have, what this one lacks."""
    return WorkerError(f"a rank was lost in step {number} after its optimizer had begun to update, and {what}; {_REMEDY}")


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield _local(argument)
        elif isinstance(argument, dist.P2POp):
            yield _local(argument.tensor)
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)  # quicker than to_local


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; 0 for a sparse one, or one that only stands for another."""
    try:
        return _local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _warn(number: int) -> None:
    print(
        f"tmrun: step {number} communicates after its first optimizer.step() and updates again: should a rank be lost between the two, "
        f"the job ends with an error; {_REMEDY}",
        file=sys.stderr,
        flush=True,
    )
