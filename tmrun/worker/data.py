"""Batches of a DataLoader with a position that can be put back: the batch of a redone step is the same one, none skipped, none twice.

>>> batches = tmrun.Batches(DataLoader(dataset, batch_size=8, sampler=sampler))   # doctest: +SKIP
>>> run = tmrun.join(model=model, optimizer=optimizer, batches=batches)   # doctest: +SKIP
>>> inputs, targets = next(batches)   # in the step's block; goes on with the next epoch by itself   # doctest: +SKIP

The position is (epoch, batches drawn in it) and the random states when the epoch began, torch's and those of the generators that loader
and samplers hold, for a loader draws its workers' seeds and the order of a shuffle from them. ``set_epoch`` of the sampler is called.
Going back:

    a few batches      a redo; they were kept, copied before anybody could change them, with the random state that drawing them left behind
    elsewhere          the epoch's iterator is made anew from those random states and run forward: by indices alone without worker processes
                       (the random state of the process itself is restored anyhow), else by drawing and dropping, for workers may draw too.
                       With ``by_state``, a loader that can say where it is (torchdata's StatefulDataLoader) is told to go on there instead:
                       quick, but what its workers draw at random it forgets

May not know: process groups, steps.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tmrun.core.errors import WorkerError
from tmrun.worker import rng, values

T = TypeVar("T")
Place = tuple[int, int]
"""Epoch, and batches drawn in it."""


@dataclass
class _Drawn(Generic[T]):
    """A batch, where the loader stood after it, and the random state then (None: worker processes drew it).

    ``loader``: what it says itself, if it can.
    """

    place: Place
    batch: T
    rng: rng.Captured | None
    loader: dict[str, Any] | None

    def copy(self) -> _Drawn[T]:
        return _Drawn(self.place, copy.deepcopy(self.batch), self.rng, self.loader)


class Batches(Generic[T]):
    """An endless iterator over a loader, epoch after epoch."""

    def __init__(self, loader: DataLoader[T], *, keep: int = 8, by_state: bool = False) -> None:
        """``keep``: how many batches a step may draw at most and still be redone without running the loader anew.

        ``by_state``: a successor calls the loader's ``load_state_dict`` instead of running it forward. Raises WorkerError if it has none.
        """
        if by_state and not hasattr(loader, "load_state_dict"):
            raise WorkerError(f"tmrun.Batches(by_state=True): a {type(loader).__name__} has no load_state_dict; leave by_state out")
        self.loader = loader
        self._by_state = by_state
        self.epoch = 0
        self.drawn = 0
        self._began = b""
        """torch's random state when the epoch began."""
        self._generated: dict[str, Any] = {}
        """... and those of the generators that loader and samplers hold."""
        self._said: dict[str, Any] | None = None
        """Where the loader says that the next batch comes from."""
        self._iterator: Iterator[T] | None = None
        self._recent: deque[_Drawn[T]] = deque(maxlen=keep + 1)
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
        self._said = drawn.loader
        self._recent.append(drawn.copy())
        return drawn.batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from. With ``by_state``, the loader begins to work if it has not."""
        if self._by_state and self._iterator is None:
            self._begin(self.epoch)
            self._said = self._say()
        generated = self._generated if self._began else self._states()
        return {"epoch": self.epoch, "drawn": self.drawn, "began": self._began, "generators": generated, "loader": self._said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        place = (state["epoch"], state["drawn"])
        known = [(self.epoch, self.drawn), *(d.place for d in self._recent)]
        same = state["began"] == self._began and state.get("generators") == self._generated
        if same and place in known and self._iterator is not None:
            self._ahead.extendleft(d.copy() for d in reversed(self._recent) if d.place > place)
            self._recent = deque((d for d in self._recent if d.place <= place), self._recent.maxlen)
        else:
            self._seek(*place, state)
        self.epoch, self.drawn = place
        self._said = state.get("loader")

    def forget(self) -> None:
        """The next position is another rank's: nothing that was drawn, or is about to be, is of it."""
        self._recent.clear()
        self._ahead.clear()
        self._iterator, self._began = None, b""

    def _draw(self) -> _Drawn[T]:
        if self._iterator is None:
            self._begin(self.epoch)
        assert self._iterator is not None
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self.drawn == 0:
                raise WorkerError("the loader of tmrun.Batches is empty") from None
        else:
            random = None if self.loader.num_workers else rng.capture()
            return _Drawn((self.epoch, self.drawn + 1), batch, random, self._say())
        self._begin(self.epoch + 1)
        self.epoch, self.drawn = self.epoch + 1, 0
        return self._draw()

    def _say(self) -> dict[str, Any] | None:
        loader: Any = self.loader
        return {"state": copy.deepcopy(loader.state_dict()), "generators": self._states()} if self._by_state else None

    def _slots(self) -> dict[str, tuple[Any, str]]:
        """Where loader and samplers hold random number generators, or may: path -> owner and name."""
        found: dict[str, tuple[Any, str]] = {}
        _collect(self.loader, "loader", found)
        return found

    def _states(self) -> dict[str, Any]:
        held = {path: getattr(owner, name) for path, (owner, name) in self._slots().items()}
        return {path: rng.stateful(generator).state_dict() for path, generator in held.items() if generator is not None}

    def _set_states(self, states: dict[str, Any]) -> None:
        """Those that were not there yet are not there again: a sampler may make its own when it is first used."""
        for path, (owner, name) in self._slots().items():
            generator = getattr(owner, name)
            if path not in states:
                if generator is not None:
                    setattr(owner, name, None)
                continue
            if generator is None:
                generator = torch.Generator()
                setattr(owner, name, generator)
            rng.stateful(generator).load_state_dict(states[path])

    def _begin(self, epoch: int) -> None:
        samplers: tuple[Any, ...] = (self.loader.sampler, self.loader.batch_sampler)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        self._began, self._generated = values.tensor_bytes(torch.get_rng_state()), self._states()
        self._iterator = iter(self.loader)

    def _seek(self, epoch: int, drawn: int, state: dict[str, Any]) -> None:
        self.forget()
        if "generators" in state:
            self._set_states(state["generators"])
        now, said = torch.get_rng_state(), state.get("loader")
        if not state["began"]:
            return
        torch.set_rng_state(_tensor(state["began"]))
        if said is None:
            self._begin(epoch)
            self._skip(drawn)
        else:
            loader: Any = self.loader
            loader.load_state_dict(copy.deepcopy(said["state"]))
            self._begin(epoch)
            self._set_states(said["generators"])
        torch.set_rng_state(now)

    def _skip(self, count: int) -> None:
        """Run the iterator forward. What it draws from the generators it has drawn then as well."""
        assert self._iterator is not None
        quick = self.loader.num_workers == 0 and not isinstance(self.loader.dataset, IterableDataset)
        indices: Iterator[Any] = getattr(self._iterator, "_sampler_iter", self._iterator) if quick else self._iterator
        for _ in range(count):
            next(indices)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _collect(owner: Any, path: str, found: dict[str, tuple[Any, str]], seen: set[int] | None = None) -> None:
    """The places for random number generators of a loader or sampler, and of the samplers in it."""
    seen = seen or set()
    seen.add(id(owner))
    for name, value in vars(owner).items():
        if isinstance(value, Sampler) and id(value) not in seen:
            _collect(value, f"{path}.{name}", found, seen)
        elif rng.stateful(value) is not value or (value is None and "generator" in name):
            found[f"{path}.{name}"] = (owner, name)
