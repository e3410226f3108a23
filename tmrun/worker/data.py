"""Batches of a DataLoader with a position that can be put back: the batch of a redone step is the same one, none skipped, none twice.

>>> batches = tmrun.Batches(DataLoader(dataset, batch_size=8, sampler=sampler))   # doctest: +SKIP
>>> run = tmrun.join(model=model, optimizer=optimizer, batches=batches)   # doctest: +SKIP
>>> inputs, targets = next(batches)   # in the step's block; goes on with the next epoch by itself   # doctest: +SKIP

The position is (epoch, batches drawn in it) and torch's random state when the epoch began, for a loader draws its workers' seeds and
the order of a shuffle from it. ``set_epoch`` of the sampler is called. Going back:

    a few batches      a redo; they were kept, copied before anybody could change them, with the random state that drawing them left behind
    elsewhere          the epoch's iterator is made anew from that random state and run forward: by indices alone without worker processes
                       (the random state of the process itself is restored anyhow), else by drawing and dropping, for workers may draw too

A loader that can say where it is (torchdata's StatefulDataLoader) needs none of this: register it directly.
May not know: process groups, steps.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from tmrun.core.errors import WorkerError
from tmrun.worker import rng, values

T = TypeVar("T")
Place = tuple[int, int]
"""Epoch, and batches drawn in it."""


@dataclass
class _Drawn(Generic[T]):
    """A batch, where the loader stood after it, and the random state then (None: worker processes drew it)."""

    place: Place
    batch: T
    rng: rng.Captured | None

    def copy(self) -> _Drawn[T]:
        return _Drawn(self.place, copy.deepcopy(self.batch), self.rng)


class Batches(Generic[T]):
    """An endless iterator over a loader, epoch after epoch."""

    def __init__(self, loader: DataLoader[T], *, keep: int = 8) -> None:
        """``keep``: how many batches a step may draw at most and still be redone without running the loader anew."""
        self.loader = loader
        self.epoch = 0
        self.drawn = 0
        self._began = b""
        self._iterator: Iterator[T] | None = None
        self._recent: deque[_Drawn[T]] = deque(maxlen=keep)
        self._ahead: deque[_Drawn[T]] = deque()

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        if self._ahead:
            drawn = self._ahead.popleft()
            if drawn.rng is not None:
                rng.restore(drawn.rng)
        else:
            drawn = self._draw()
        self.epoch, self.drawn = drawn.place
        self._recent.append(drawn.copy())
        return drawn.batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from."""
        return {"epoch": self.epoch, "drawn": self.drawn, "began": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        place = (state["epoch"], state["drawn"])
        known = [(self.epoch, self.drawn), *(d.place for d in self._recent)]
        if state["began"] == self._began and place in known and self._iterator is not None:
            self._ahead.extendleft(d.copy() for d in reversed(self._recent) if d.place > place)
            self._recent = deque((d for d in self._recent if d.place <= place), self._recent.maxlen)
        else:
            self._seek(*place, state["began"])
        self.epoch, self.drawn = place

    def _draw(self) -> _Drawn[T]:
        if self._iterator is None:
            self._begin(self.epoch)
        assert self._iterator is not None
        try:
            batch = next(self._iterator)
            return _Drawn((self.epoch, self.drawn + 1), batch, None if self.loader.num_workers else rng.capture())
        except StopIteration:
            if self.drawn == 0:
                raise WorkerError("the loader of tmrun.Batches is empty") from None
        self._begin(self.epoch + 1)
        self.epoch, self.drawn = self.epoch + 1, 0
        return self._draw()

    def _begin(self, epoch: int) -> None:
        samplers: tuple[Any, ...] = (self.loader.sampler, self.loader.batch_sampler)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        self._began = values.tensor_bytes(torch.get_rng_state())
        self._iterator = iter(self.loader)

    def _seek(self, epoch: int, drawn: int, began: bytes) -> None:
        self._recent.clear()
        self._ahead.clear()
        self._iterator, self._began = None, b""
        if not began:
            return
        now = torch.get_rng_state()
        torch.set_rng_state(torch.frombuffer(bytearray(began), dtype=torch.uint8))
        self._begin(epoch)
        assert self._iterator is not None
        quick = self.loader.num_workers == 0 and not isinstance(self.loader.dataset, IterableDataset)
        indices: Iterator[Any] = getattr(self._iterator, "_sampler_iter", self._iterator) if quick else self._iterator
        for _ in range(drawn):
            next(indices)
        torch.set_rng_state(now)
