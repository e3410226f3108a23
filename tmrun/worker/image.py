"""The tensors of a state as bytes, in parts of at most ``PART``: what travels at a time, and where it is read and written.

A large tensor is read and written where it is; small ones are packed together. Of what is not contiguous there is a flat copy, but only
while its own parts pass. So whoever receives needs no more room than its own tensors and the parts that are under way.
May not know: who sends, over what.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tmrun.worker import values
from tmrun.worker.state import Layout, State

PART = int(os.environ.get("TMRUN_TEST_PART", 32 << 20))
_LARGE = min(PART, 1 << 20)
"""Bytes from which on a tensor is worth messages of its own."""
_ALIGN = 16


class Span(NamedTuple):
    """Bytes of one tensor."""

    tensor: int
    start: int
    end: int


def parts_of(sizes: Sequence[int], shared: Sequence[bool], where: Sequence[str]) -> Iterator[list[Span]]:
    """How tensors of so many bytes travel: spans of one large tensor, or small ones whole; ``shared`` and others apart, and those
    of different devices.

    The same on all sides.
    """
    small: dict[tuple[bool, str], list[Span]] = {}
    for number, (size, kind, device) in enumerate(zip(sizes, shared, where, strict=True)):
        if size >= _LARGE:
            for start in range(0, size, PART):
                yield [Span(number, start, min(start + PART, size))]
        elif size:
            together = small.setdefault((kind, device), [])
            if together and room_of([*together, Span(number, 0, size)]) > PART:
                yield list(together)
                together.clear()
            together.append(Span(number, 0, size))
    yield from (rest for _, rest in sorted(small.items(), key=lambda each: (not each[0][0], each[0][1])) if rest)


def room_of(part: Sequence[Span]) -> int:
    """Bytes of a part."""
    return part[0].end - part[0].start if len(part) == 1 else sum(_aligned(s.end - s.start) for s in part)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN


class Image:
    """See the module's text. A part is read, or written, ``in_place`` if whoever carries it reaches the memory of its device."""

    def __init__(self, state: State, layout: Layout) -> None:
        tensors = state.tensors()
        named = [(name, key, device) for name, entries in layout.items() for key, _, _, device in entries]
        shared = {name: state.shared(name) for name in layout}
        self._tensors = [tensors[name][key] for name, key, _ in named]
        self._bytes = [values.as_bytes(t) if t.is_contiguous() else None for t in self._tensors]
        self._where = [device for *_, device in named]
        self._shared = [key in shared[name] for name, key, _ in named]
        self._flat: dict[int, torch.Tensor] = {}
        self.parts = list(parts_of([t.nbytes for t in self._tensors], self._shared, self._where))
        self.total = sum(map(room_of, self.parts))

    def where(self, part: Sequence[Span]) -> str:
        """Type of the device that a part lies on."""
        return self._where[part[0].tensor]

    def dealt(self, sources: int) -> Iterator[int]:
        """Which of so many sources sends each part."""
        turn = itertools.cycle(range(sources))
        return (next(turn) if self._shared[part[0].tensor] else 0 for part in self.parts)

    def share(self, sources: int, which: int) -> Iterator[list[Span]]:
        """The parts that one of so many sources sends."""
        return (part for part, source in zip(self.parts, self.dealt(sources), strict=True) if source == which)

    def read(self, part: Sequence[Span], *, in_place: bool) -> torch.Tensor:
        """A part's bytes; to be read only. Parts are read in their order."""
        for passed in [number for number in self._flat if number < part[0].tensor]:
            del self._flat[passed]
        return self._at(part[0]) if self._whole(part, in_place) else self.copy(part, self._buffer(part, in_place).zero_())

    def copy(self, part: Sequence[Span], into: torch.Tensor) -> torch.Tensor:
        """A part's bytes in a buffer."""
        for span, place in self._places(part, into):
            place.copy_(self._at(span))
        return into

    def room(self, part: Sequence[Span], *, in_place: bool) -> torch.Tensor:
        """Where to receive a part: in place, or a buffer for ``write``."""
        return self._at(part[0]) if self._whole(part, in_place) else self._buffer(part, in_place)

    def write(self, part: Sequence[Span], buffer: torch.Tensor) -> None:
        """Put a part's bytes back. Parts are written in their order, and all of them."""
        for span, place in self._places(part, buffer):
            if self._at(span).data_ptr() != place.data_ptr():
                self._at(span).copy_(place)
            tensor = self._tensors[span.tensor]
            if span.end == tensor.nbytes and (flat := self._flat.pop(span.tensor, None)) is not None:
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def _whole(self, part: Sequence[Span], in_place: bool) -> bool:
        device = self._tensors[part[0].tensor].device.type
        return len(part) == 1 and (device == "cpu" or (in_place and device == self.where(part)))

    def _buffer(self, part: Sequence[Span], in_place: bool) -> torch.Tensor:
        device = self._tensors[part[0].tensor].device if in_place else torch.device("cpu")
        return torch.empty(room_of(part), dtype=torch.uint8, device=device)

    def _at(self, span: Span) -> torch.Tensor:
        flat = self._bytes[span.tensor]
        if flat is None:
            flat = self._flat.get(span.tensor)
        if flat is None:
            flat = self._flat[span.tensor] = values.as_bytes(self._tensors[span.tensor])
        return flat[span.start : span.end]

    def _places(self, part: Sequence[Span], buffer: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor]]:
        start = 0
        for span in part:
            yield span, buffer[start : start + span.end - span.start]
            start += _aligned(span.end - span.start)
