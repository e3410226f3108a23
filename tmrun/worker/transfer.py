"""One rank's state, from a process that has it to one that takes over.

A *source* message has a tree of plain values, then all tensors, then a digest of everything. A *needs* message is a tree alone. The
tensors travel in *parts* (``image``): a large tensor straight from and into its memory, small ones packed together (a message each would
cost twenty times as much). Everything goes over the control backend, but for the parts on a device that a backend of its own reaches
(``Direct``): these never touch the CPU. The next parts are under way while one is summed. The receiver compares layouts first,
copies in place, and checks the digest. Several sources that hold the same parameters each send their share of the parts (buffers, which may
differ, come from the first), every one with a digest of its own; in a drain it sends the digest back, and only then may the leaver go.
A device's backend may never tell that its peer has gone: while parts come over one, whoever receives listens on the control backend too.
May not know: when this happens, what the trees contain.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tmrun.core.errors import WorkerError
from tmrun.worker import values
from tmrun.worker.comm import LONG, Backend
from tmrun.worker.image import PART, Image, Span, room_of
from tmrun.worker.state import Needs, State

_AHEAD = 2 * PART
"""Bytes under way beside the part that is worked on, for each source."""
_LOOK_S = 0.0002
STALL = timedelta(seconds=float(os.environ.get("TMRUN_TEST_STALL_S", "60")))
"""How long a part of a drain's transfer may take before the other side counts as dead: no Prepare tells of a leaver that hangs."""
_TREE, _TENSORS, _DIGEST, _ACK, _NEEDS, _WITNESSED = 11, 12, 13, 14, 15, 16


Direct = Mapping[str, Backend]
"""Device type -> the backend that reaches that device's memory on both sides."""
CONTROL_ONLY: Direct = {}


UnderWay = list[tuple[dist.Work, torch.Tensor]]
"""Sends that nobody waits for, and what they need kept."""


Told = Callable[[int, int], None]
"""Progress: bytes done, bytes in all."""


@dataclass
class Parcel:
    """A rank's state at one moment, ready to be sent: an encoded tree (layout and plain values included) and the packed tensors."""

    body: bytes
    buckets: list[torch.Tensor]


def pack(state: State, tree: dict[str, Any], spare: Parcel | None = None) -> tuple[Parcel, float]:
    """Copy the state, into the buffers of ``spare`` if they fit. Returns also how long copying took, fresh buffers not counted."""
    layout = state.layout()
    image = Image(state, layout)
    sizes = [room_of(part) for part in image.parts]
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
    state.put_rest(tree["rest"])
    return tree


def send_source(
    backend: Backend,
    to: int,
    state: State,
    tree: dict[str, Any],
    patience: timedelta = LONG,
    sources: Sequence[int] = (),
    direct: Direct = CONTROL_ONLY,
) -> tuple[int, bytes]:
    """Send the tree and our share of the tensors of ``state``; we are the first of ``sources``, none: the only one.

    Returns bytes sent and their digest. Raises RuntimeError when the peer is gone.
    """
    layout = state.layout()
    parts = _read(Image(state, layout), max(1, len(sources)), 0, backend, direct)
    return _send(backend, to, {**tree, "layout": layout, "rest": state.rest(), "sources": list(sources)}, parts, patience)


def send_share(backend: Backend, to: int, state: State, sources: int, which: int, direct: Direct = CONTROL_ONLY) -> int:
    """Send only our share of the tensors. Returns bytes sent."""
    digest = hashlib.blake2b(digest_size=16)
    return _send_parts(backend, to, _read(Image(state, state.layout()), sources, which, backend, direct), digest, LONG)


def send_parcel(backend: Backend, to: int, parcel: Parcel, tree: dict[str, Any]) -> tuple[int, bytes]:
    """Send a copy as ``send_source`` would have then; ``tree`` is newer than the copy's own."""
    return _send(backend, to, {**tree, "copy": parcel.body}, ((backend, bucket) for bucket in parcel.buckets), LONG)


Carried = tuple[Backend, torch.Tensor]
"""A part, and what carries it."""


def _read(image: Image, sources: int, which: int, control: Backend, direct: Direct) -> Iterator[Carried]:
    for part in image.share(sources, which):
        carrier = direct.get(image.where(part), control)
        yield carrier, image.read(part, in_place=carrier is not control)


def _send(backend: Backend, to: int, tree: dict[str, Any], parts: Iterable[Carried], patience: timedelta) -> tuple[int, bytes]:
    body = values.encode(tree)
    digest = hashlib.blake2b(body, digest_size=16)
    total = _send_bytes(backend, to, body, _TREE) + _send_parts(backend, to, parts, digest, patience)
    return total, digest.digest()


def _send_parts(backend: Backend, to: int, parts: Iterable[Carried], digest: hashlib.blake2b, patience: timedelta) -> int:
    total = ahead = 0
    under_way: deque[tuple[dist.Work, torch.Tensor, Wait]] = deque()
    for carrier, part in parts:
        under_way.append((carrier.send([part], to, _TENSORS), part, _wait if carrier is backend else _poll))
        digest.update(values.sums(part))
        total += part.numel()
        ahead += part.numel()
        while ahead - under_way[0][1].numel() > _AHEAD:
            work, oldest, wait = under_way.popleft()
            wait(work, patience)
            ahead -= oldest.numel()
    for work, _, wait in under_way:
        wait(work, patience)
    backend.send([_tensor(digest.digest())], to, _DIGEST).wait(patience)
    return total


def receive_source(
    backend: Backend,
    sender: int,
    state: State,
    patience: timedelta = LONG,
    told: Told | None = None,
    direct: Direct = CONTROL_ONLY,
) -> tuple[dict[str, Any], int, bytes]:
    """Receive into ``state``, in place. Returns the sender's tree, bytes received and their digest.

    ``patience``: how long one part may take; the sender may begin ten times as late. ``told(done, total)`` hears of every part. Raises
    RuntimeError when a sender is gone or what it sent arrived damaged, WorkerError when its state does not fit.
    """
    body = _receive_bytes(backend, sender, _TREE, min(LONG, 10 * patience))
    digest = hashlib.blake2b(body, digest_size=16)
    tree = values.decode(body)
    if "copy" in tree:
        tree, direct = {**values.decode(tree["copy"]), **tree}, CONTROL_ONLY
    state.adopt(tree["layout"])
    image = Image(state, tree["layout"])
    digests = {sender: digest, **{other: hashlib.blake2b(digest_size=16) for other in tree.get("sources", ()) if other != sender}}
    theirs = {source: _Digest(backend, source, digest.digest_size, patience) for source in digests}
    if direct:
        for each in theirs.values():
            each.listen()
    done = 0
    with torch.no_grad():
        for source, part, buffer in _receive_parts(backend, direct, theirs, image, patience):
            digests[source].update(values.sums(buffer))
            image.write(part, buffer)
            done += buffer.numel()
            if told is not None:
                told(done, image.total)
    for source, ours in digests.items():
        if theirs[source].result() != ours.digest():
            raise dist.DistBackendError(f"the state from rank {source} arrived damaged")  # not the script's fault
    state.put_rest(tree["rest"])
    return tree, len(body) + done, digest.digest()


class _Digest:
    """What a source says on the control backend after its last part. ``listen``: from now on, so that ``check`` knows when it has gone."""

    def __init__(self, control: Backend, source: int, size: int, patience: timedelta) -> None:
        self._control, self._source, self._patience = control, source, patience
        self._buffer = torch.empty(size, dtype=torch.uint8)
        self._listener: threading.Thread | None = None
        self._error: RuntimeError | None = None

    def listen(self) -> None:
        """On a thread of its own, for as long as it takes."""
        self._listener = threading.Thread(target=self._listen, name="tmrun-listen", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        try:
            self._receive(LONG)
        except RuntimeError as error:
            self._error = error

    def _receive(self, patience: timedelta) -> None:
        self._control.recv([self._buffer], self._source, _DIGEST).wait(patience)

    def check(self) -> None:
        """Raises RuntimeError when the source has gone, as far as is known."""
        if self._error is not None:
            raise dist.DistBackendError(f"rank {self._source} has gone: {self._error}")

    def result(self) -> bytes:
        """Wait for it. Raises RuntimeError when it does not come."""
        if self._listener is None:
            self._receive(self._patience)
        else:
            self._listener.join(self._patience.total_seconds())
            self.check()
            if self._listener.is_alive():
                raise dist.DistBackendError(f"rank {self._source} did not end its part of the state")
        return values.tensor_bytes(self._buffer)


Asked = tuple[int, list[Span], torch.Tensor]
"""From whom, what, where to."""


def _receive_parts(control: Backend, direct: Direct, digests: Mapping[int, _Digest], image: Image, patience: timedelta) -> Iterator[Asked]:
    """Every part, once it arrived; the next ones are asked for ahead, so that no sender need wait."""
    under_way: deque[tuple[dist.Work, Asked, Wait]] = deque()
    sources, ahead = list(digests), 0
    for part, which in zip(image.parts, image.dealt(len(sources)), strict=True):
        carrier = direct.get(image.where(part), control)
        buffer = image.room(part, in_place=carrier is not control)
        source = sources[which]
        wait = _wait if carrier is control else partial(_poll, check=digests[source].check)
        under_way.append((carrier.recv([buffer], source, _TENSORS), (source, part, buffer), wait))
        ahead += buffer.numel()
        while ahead - under_way[0][1][2].numel() > _AHEAD * len(sources):
            asked = _arrived(*under_way.popleft(), patience)
            ahead -= asked[2].numel()
            yield asked
    while under_way:
        yield _arrived(*under_way.popleft(), patience)


Wait = Callable[[dist.Work, timedelta], None]
"""For one part. Raises RuntimeError."""


def _arrived(work: dist.Work, asked: Asked, wait: Wait, patience: timedelta) -> Asked:
    wait(work, patience)
    return asked


def _wait(work: dist.Work, patience: timedelta) -> None:
    """On the control backend."""
    work.wait(patience)


def _poll(work: dist.Work, patience: timedelta, check: Callable[[], None] = lambda: None) -> None:
    """On a device, where torch would look every 10 ms only: longer than a part takes. Raises what ``check`` does."""
    deadline = time.monotonic() + patience.total_seconds()
    while not work.is_completed():
        check()
        if time.monotonic() > deadline:
            raise dist.DistBackendError(f"a part of the state took longer than {patience.total_seconds():g} s")
        time.sleep(_LOOK_S)
    work.wait()


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
