"""One rank's state, from a process that has it to one that takes over.

A *source* message has a tree of plain values, then all tensors, then a digest of everything. A *needs* message is a tree alone. The
tensors travel in *parts* of at most ``PART`` bytes: a large tensor straight from and into its memory, small ones packed together
(a message each would cost twenty times as much). The next parts are under way while one is summed. The receiver compares layouts first,
copies in place, and checks the digest. Several sources that hold the same parameters each send their share of the parts (buffers, which may
differ, come from the first), every one with a digest of its own; in a drain it sends the digest back, and only then may the leaver go.
May not know: when this happens, what the trees contain.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tmrun.core.errors import WorkerError
from tmrun.worker import values
from tmrun.worker.comm import LONG, Backend
from tmrun.worker.state import Layout, Needs, State

PART = int(os.environ.get("TMRUN_TEST_PART", 32 << 20))
_LARGE = min(PART, 1 << 20)
"""Bytes from which on a tensor is worth messages of its own."""
_AHEAD = 2 * PART
"""Bytes under way beside the part that is worked on, for each source."""
_ALIGN = 16
_SUMMED = 1 << 13
"""Bytes that share one checksum."""
STALL = timedelta(seconds=float(os.environ.get("TMRUN_TEST_STALL_S", "60")))
"""How long a part of a drain's transfer may take before the other side counts as dead: no Prepare tells of a leaver that hangs."""
_TREE, _TENSORS, _DIGEST, _ACK, _NEEDS, _WITNESSED = 11, 12, 13, 14, 15, 16


UnderWay = list[tuple[dist.Work, torch.Tensor]]
"""Sends that nobody waits for, and what they need kept."""


Told = Callable[[int, int], None]
"""Progress: bytes done, bytes in all."""


@dataclass
class Parcel:
    """A rank's state at one moment, ready to be sent: an encoded tree (layout and plain values included) and the packed tensors."""

    body: bytes
    buckets: list[torch.Tensor]


class Span(NamedTuple):
    """Bytes of one tensor."""

    tensor: int
    start: int
    end: int


def parts_of(sizes: Sequence[int], shared: Sequence[bool]) -> Iterator[list[Span]]:
    """How tensors of so many bytes travel: spans of one large tensor, or small ones whole, ``shared`` and others apart.

    The same on all sides.
    """
    small: dict[bool, list[Span]] = {True: [], False: []}
    for number, (size, kind) in enumerate(zip(sizes, shared, strict=True)):
        if size >= _LARGE:
            for start in range(0, size, PART):
                yield [Span(number, start, min(start + PART, size))]
        elif size:
            if small[kind] and _room([*small[kind], Span(number, 0, size)]) > PART:
                yield small[kind]
                small[kind] = []
            small[kind].append(Span(number, 0, size))
    yield from (rest for rest in small.values() if rest)


def _room(part: Sequence[Span]) -> int:
    return part[0].end - part[0].start if len(part) == 1 else sum(_aligned(s.end - s.start) for s in part)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN


class Image:
    """The tensors of a state as bytes. Contiguous ones on the CPU are read and written where they are."""

    def __init__(self, state: State, layout: Layout) -> None:
        self._tensors = list(_flat(state.tensors(), layout))
        self._bytes = [values.as_bytes(t) for t in self._tensors]
        self._shared = [key in shared for name, entries in layout.items() for shared in (state.shared(name),) for key, *_ in entries]
        self.parts = list(parts_of([t.nbytes for t in self._tensors], self._shared))
        self.total = sum(_room(part) for part in self.parts)

    def dealt(self, sources: int) -> Iterator[int]:
        """Which of so many sources sends each part."""
        turn = itertools.cycle(range(sources))
        return (next(turn) if self._shared[part[0].tensor] else 0 for part in self.parts)

    def share(self, sources: int, which: int) -> Iterator[torch.Tensor]:
        """The parts that one of so many sources sends."""
        return (self.read(part) for part, source in zip(self.parts, self.dealt(sources), strict=True) if source == which)

    def read(self, part: Sequence[Span]) -> torch.Tensor:
        """A part's bytes; to be read only."""
        if len(part) == 1 and self._bytes[part[0].tensor].device.type == "cpu":
            return self._at(part[0])
        return self.copy(part, torch.zeros(_room(part), dtype=torch.uint8))

    def copy(self, part: Sequence[Span], into: torch.Tensor) -> torch.Tensor:
        """A part's bytes in a buffer."""
        for span, place in self._places(part, into):
            place.copy_(self._at(span))
        return into

    def room(self, part: Sequence[Span]) -> torch.Tensor:
        """Where to receive a part: in place, or a buffer for ``write``."""
        single = len(part) == 1 and self._bytes[part[0].tensor].device.type == "cpu"
        return self._at(part[0]) if single else torch.empty(_room(part), dtype=torch.uint8)

    def write(self, part: Sequence[Span], buffer: torch.Tensor) -> None:
        """Put a part's bytes back."""
        for span, place in self._places(part, buffer):
            if self._at(span).data_ptr() != place.data_ptr():
                self._at(span).copy_(place)

    def finish(self) -> None:
        """After all parts were written."""
        for tensor, flat in zip(self._tensors, self._bytes, strict=True):
            if tensor.numel() and not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def _at(self, span: Span) -> torch.Tensor:
        return self._bytes[span.tensor][span.start : span.end]

    def _places(self, part: Sequence[Span], buffer: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor]]:
        start = 0
        for span in part:
            yield span, buffer[start : start + span.end - span.start]
            start += _aligned(span.end - span.start)


def pack(state: State, tree: dict[str, Any], spare: Parcel | None = None) -> tuple[Parcel, float]:
    """Copy the state, into the buffers of ``spare`` if they fit. Returns also how long copying took, fresh buffers not counted."""
    layout = state.layout()
    image = Image(state, layout)
    sizes = [_room(part) for part in image.parts]
    fits = spare is not None and [b.numel() for b in spare.buckets] == sizes
    buffers = spare.buckets if spare is not None and fits else [torch.zeros(size, dtype=torch.uint8).fill_(0) for size in sizes]
    began = time.perf_counter()
    for part, buffer in zip(image.parts, buffers, strict=True):
        image.copy(part, buffer)
    body = values.encode({**tree, "layout": layout, "rest": state.rest()})
    return Parcel(body, buffers), time.perf_counter() - began


def unpack(state: State, parcel: Parcel) -> dict[str, Any]:
    """Copy a parcel back, in place; returns its tree."""
    tree: dict[str, Any] = values.decode(parcel.body)
    state.adopt(tree["layout"])
    image = Image(state, tree["layout"])
    with torch.no_grad():
        for part, buffer in zip(image.parts, parcel.buckets, strict=True):
            image.write(part, buffer)
        image.finish()
    state.put_rest(tree["rest"])
    return tree


def send_source(
    backend: Backend, to: int, state: State, tree: dict[str, Any], patience: timedelta = LONG, sources: Sequence[int] = ()
) -> tuple[int, bytes]:
    """Send the tree and our share of the tensors of ``state``; we are the first of ``sources``, none: the only one.

    Returns bytes sent and their digest. Raises RuntimeError when the peer is gone.
    """
    layout = state.layout()
    parts = Image(state, layout).share(max(1, len(sources)), 0)
    return _send(backend, to, {**tree, "layout": layout, "rest": state.rest(), "sources": list(sources)}, parts, patience)


def send_share(backend: Backend, to: int, state: State, sources: int, which: int) -> int:
    """Send only our share of the tensors. Returns bytes sent."""
    digest = hashlib.blake2b(digest_size=16)
    return _send_parts(backend, to, Image(state, state.layout()).share(sources, which), digest, LONG)


def send_parcel(backend: Backend, to: int, parcel: Parcel, tree: dict[str, Any]) -> tuple[int, bytes]:
    """Send a copy as ``send_source`` would have then; ``tree`` is newer than the copy's own."""
    return _send(backend, to, {**tree, "copy": parcel.body}, parcel.buckets, LONG)


def _send(backend: Backend, to: int, tree: dict[str, Any], parts: Iterable[torch.Tensor], patience: timedelta) -> tuple[int, bytes]:
    body = values.encode(tree)
    digest = hashlib.blake2b(body, digest_size=16)
    total = _send_bytes(backend, to, body, _TREE) + _send_parts(backend, to, parts, digest, patience)
    return total, digest.digest()


def _send_parts(backend: Backend, to: int, parts: Iterable[torch.Tensor], digest: hashlib.blake2b, patience: timedelta) -> int:
    total = ahead = 0
    under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
    for part in parts:
        under_way.append((backend.send([part], to, _TENSORS), part))
        digest.update(_sums(part))
        total += part.numel()
        ahead += part.numel()
        while ahead - under_way[0][1].numel() > _AHEAD:
            work, oldest = under_way.popleft()
            work.wait(patience)
            ahead -= oldest.numel()
    for work, _ in under_way:
        work.wait(patience)
    backend.send([_tensor(digest.digest())], to, _DIGEST).wait(patience)
    return total


def receive_source(
    backend: Backend, sender: int, state: State, patience: timedelta = LONG, told: Told | None = None
) -> tuple[dict[str, Any], int, bytes]:
    """Receive into ``state``, in place. Returns the sender's tree, bytes received and their digest.

    ``patience``: how long one part may take; the sender may begin ten times as late. ``told(done, total)`` hears of every part.
    """
    body = _receive_bytes(backend, sender, _TREE, min(LONG, 10 * patience))
    digest = hashlib.blake2b(body, digest_size=16)
    tree = values.decode(body)
    if "copy" in tree:
        tree = {**values.decode(tree["copy"]), **tree}
    state.adopt(tree["layout"])
    image = Image(state, tree["layout"])
    digests = {sender: digest, **{other: hashlib.blake2b(digest_size=16) for other in tree.get("sources", ()) if other != sender}}
    done = 0
    with torch.no_grad():
        for source, part, buffer in _receive_parts(backend, list(digests), image, patience):
            digests[source].update(_sums(buffer))
            image.write(part, buffer)
            done += buffer.numel()
            if told is not None:
                told(done, image.total)
        image.finish()
    for source, ours in digests.items():
        theirs = torch.empty(ours.digest_size, dtype=torch.uint8)
        backend.recv([theirs], source, _DIGEST).wait(patience)
        if values.tensor_bytes(theirs) != ours.digest():
            raise WorkerError(f"the state from rank {source} arrived damaged")
    state.put_rest(tree["rest"])
    return tree, len(body) + done, digest.digest()


Asked = tuple[int, list[Span], torch.Tensor]
"""From whom, what, where to."""


def _receive_parts(backend: Backend, sources: Sequence[int], image: Image, patience: timedelta) -> Iterator[Asked]:
    """Every part, once it arrived; the next ones are asked for ahead, so that no sender need wait."""
    under_way: deque[tuple[dist.Work, Asked]] = deque()
    ahead = 0
    for part, which in zip(image.parts, image.dealt(len(sources)), strict=True):
        buffer = image.room(part)
        under_way.append((backend.recv([buffer], sources[which], _TENSORS), (sources[which], part, buffer)))
        ahead += buffer.numel()
        while ahead - under_way[0][1][2].numel() > _AHEAD * len(sources):
            asked = _arrived(*under_way.popleft(), patience)
            ahead -= asked[2].numel()
            yield asked
    while under_way:
        yield _arrived(*under_way.popleft(), patience)


def _arrived(work: dist.Work, asked: Asked, patience: timedelta) -> Asked:
    work.wait(patience)
    return asked


def _sums(part: torch.Tensor) -> bytes:
    """Sums of 64-bit words, one for every 8 KiB, at the speed of memory: a hash of all bytes took longer than sending them."""
    if part.storage_offset() % 8 or part.data_ptr() % 8:
        part = part.clone()
    even = part.numel() // _SUMMED * _SUMMED
    rest = part[even:].to(torch.int64)
    tail = (rest * torch.arange(1, rest.numel() + 1)).sum()
    return values.tensor_bytes(torch.cat([part[:even].view(torch.int64).view(-1, _SUMMED // 8).sum(1), tail[None]]))


def acknowledge(backend: Backend, to: int, digest: bytes) -> None:
    """Tell the leaver that its state is safe."""
    backend.send([_tensor(digest)], to, _ACK).wait(STALL)


def await_acknowledgement(backend: Backend, sender: int, digest: bytes) -> None:
    """Block until the joiner confirmed exactly what was sent."""
    theirs = torch.empty(len(digest), dtype=torch.uint8)
    backend.recv([theirs], sender, _ACK).wait(STALL)
    if values.tensor_bytes(theirs) != digest:
        raise WorkerError("the joiner confirmed a different state")


def send_needs(backend: Backend, to: int, needs: Needs) -> int:
    """Send what a lost rank said to its successor."""
    return _send_bytes(backend, to, values.encode(needs), _NEEDS)


def receive_needs(backend: Backend, sender: int) -> Needs:
    """Receive what our rank said last."""
    needs: Needs = values.decode(_receive_bytes(backend, sender, _NEEDS))
    return needs


def send_witnessed(backend: Backend, to: int, needs: Needs) -> UnderWay:
    """Begin to send what we said to a new witness of ours."""
    parts = _with_length(values.encode(needs))
    return [(backend.send([part], to, _WITNESSED), part) for part in parts]


def receive_witnessed(backend: Backend, ward: int) -> Needs:
    """Receive what a ward said."""
    needs: Needs = values.decode(_receive_bytes(backend, ward, _WITNESSED))
    return needs


def _with_length(body: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([len(body)]), _tensor(body)


def _send_bytes(backend: Backend, to: int, body: bytes, tag: int) -> int:
    for part in _with_length(body):
        backend.send([part], to, tag).wait(LONG)
    return len(body)


def _receive_bytes(backend: Backend, sender: int, tag: int, patience: timedelta = LONG) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    backend.recv([length], sender, tag).wait(patience)
    body = torch.empty(int(length), dtype=torch.uint8)
    backend.recv([body], sender, tag).wait(patience)
    return values.tensor_bytes(body)


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _flat(tensors: dict[str, dict[str, torch.Tensor]], layout: Layout) -> Iterable[torch.Tensor]:
    return (tensors[name][key] for name, entries in layout.items() for key, *_ in entries)
