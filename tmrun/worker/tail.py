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

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.hooks import RemovableHandle

from tmrun.core.errors import WorkerError
from tmrun.worker import record, values
from tmrun.worker.process import Process
from tmrun.worker.state import local

_PAIRWISE = ("isend", "irecv", "batch_isend_irecv")
_REMEDY = "finish communication before the first optimizer.step() of a step, or make it two steps"


class Tail:
    """Of one step, from the moment its vote passed."""

    def __init__(self, process: Process, number: int) -> None:
        self._process, self._number = process, number
        self._hidden, self._started = process.live.hidden, process.live.started
        self._tells = process.rank == 0 and process.counters.done == 0
        self._skipped = 0
        self._seen: list[tuple[int, int, int]] | None = None
        """Of every parameter, when the script communicated after the last update, what shows most changes."""
        self._contents: list[bytes] | None = None
        """... and what shows all, when something was first skipped."""
        self._given: list[int] = []
        """Where the memory is that the script's collectives worked on."""
        self._hooks: list[RemovableHandle] = []
        if process.live.groups.poisoned:
            self._hear_gradients()

    def collective(self, original: Callable[..., Any], call: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A collective of the script, to its end: one that is only waited for later would be skipped behind our back.

        Not so what goes from one to another: whoever sends may have to post a receive before that can end.
        """
        self._note(args, kwargs)
        hidden = self._process.live.hidden
        try:
            result = call()
            if not self._process.live.queues and getattr(original, "__name__", "") not in _PAIRWISE:
                _finish(result)
            return result
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
        started = self._process.live.started
        if self._is_broken(complete=started != self._started):
            raise half_step(self._number, "an optimizer updates with what was not communicated")
        if self._tells and started != self._started:
            self._tells = False
            _warn(self._number)
        self._started = started
        self._seen, self._given = None, []

    def end(self) -> None:
        """The block is over. Raises WorkerError if skipped communication went into parameters."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._seen is None or not (self._process.live.queues or self._is_broken(complete=False)):
            return  # the usual step, in which nothing is to be looked at
        changed = self._seen != self._signs() or (self._contents is not None and self._contents != self._digests())
        given = not {_address(p) for p in self._process.state.trained()}.isdisjoint(self._given)
        if (changed or given) and self._is_broken(complete=True):
            what = "parameters were changed after a collective that was skipped" if changed else "a collective on parameters was skipped"
            raise half_step(self._number, what)

    def _is_broken(self, *, complete: bool) -> bool:
        """Whether anything was skipped. What is only queued on a device has to run before that is known."""
        live = self._process.live
        if complete and live.queues:
            try:
                live.complete()
            except RuntimeError:
                return True
            if live.failing or self._process.board.failure is not None:
                return True
        return self._skipped > 0 or live.hidden != self._hidden

    def _signs(self) -> list[tuple[int, int, int]]:
        return [(p._version, values.shard(p)._version, values.shard(p).data_ptr()) for p in self._process.state.trained()]

    def _digests(self) -> list[bytes]:
        return [values.fingerprint(local(p)) for p in self._process.state.trained()]

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


def _finish(result: Any) -> None:
    """Wait for what a collective gave."""
    if isinstance(result, dist.Work):
        if not record.is_put_off(result):
            result.wait()
    elif isinstance(result, AsyncCollectiveTensor):
        result.trigger_wait()
    elif isinstance(result, (list, tuple)):
        for each in result:
            _finish(each)


def _tensors(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield values.shard(argument)
        elif isinstance(argument, dist.P2POp):
            yield values.shard(argument.tensor)
        elif isinstance(argument, (list, tuple)) and isinstance(next(iter(argument), None), (torch.Tensor, dist.P2POp, list, tuple)):
            yield from _tensors(argument)


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; its identity for a sparse one, or one that only stands for another."""
    try:
        return values.shard(tensor).untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _warn(number: int) -> None:
    print(
        f"tmrun: step {number} communicates after its first optimizer.step() and updates again: should a rank be lost between the two, "
        f"the job ends with an error; {_REMEDY}",
        file=sys.stderr,
        flush=True,
    )
