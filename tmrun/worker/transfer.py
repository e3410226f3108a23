"""One rank's state, from a process that has it to one that takes over.

A *source* message has a tree of plain values, then all tensors packed into large buckets (a message each; hundreds of small sends cost
twenty times as much), then a digest of everything. A *needs* message is a tree alone. The receiver compares layouts first, copies in
place, and checks the digest; in a drain it sends the digest back, and only then may the leaver go.
May not know: when this happens, what the trees contain.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tmrun.core.errors import WorkerError
from tmrun.worker import values
from tmrun.worker.comm import Backend
from tmrun.worker.state import Layout, Needs, State

_BUCKET = 32 << 20
_ALIGN = 16
_TREE, _TENSORS, _DIGEST, _ACK, _NEEDS, _WITNESSED = 11, 12, 13, 14, 15, 16


UnderWay = list[tuple[dist.Work, torch.Tensor]]
"""Sends that nobody waits for, and what they need kept."""


@dataclass
class Parcel:
    """A rank's state at one moment, ready to be sent: an encoded tree (layout and plain values included) and the packed tensors."""

    body: bytes
    buckets: list[torch.Tensor]


def pack(state: State, tree: dict[str, Any], spare: Parcel | None = None) -> tuple[Parcel, float]:
    """Copy the state, into the buffers of ``spare`` if they fit. Returns also how long copying took, fresh buffers not counted."""
    layout = state.layout()
    plans = list(_buckets(list(_flat(state.tensors(), layout))))
    sizes = [_size(bucket) for bucket in plans]
    fits = spare is not None and [b.numel() for b in spare.buckets] == sizes
    buffers = spare.buckets if spare is not None and fits else [torch.zeros(size, dtype=torch.uint8).fill_(0) for size in sizes]
    began = time.perf_counter()
    for bucket, buffer in zip(plans, buffers, strict=True):
        _fill(buffer, bucket)
    body = values.encode({**tree, "layout": layout, "rest": state.rest()})
    return Parcel(body, buffers), time.perf_counter() - began


def unpack(state: State, parcel: Parcel) -> dict[str, Any]:
    """Copy a parcel back, in place; returns its tree."""
    tree: dict[str, Any] = values.decode(parcel.body)
    state.adopt(tree["layout"])
    with torch.no_grad():
        for bucket, buffer in zip(_buckets(list(_flat(state.tensors(), tree["layout"]))), parcel.buckets, strict=True):
            _empty(buffer, bucket)
    state.put_rest(tree["rest"])
    return tree


def send_source(backend: Backend, to: int, state: State, tree: dict[str, Any]) -> tuple[int, bytes]:
    """Send the tree and all tensors of ``state``. Returns bytes sent and their digest."""
    layout = state.layout()
    buckets = _buckets(list(_flat(state.tensors(), layout)))
    packed = (_fill(torch.zeros(_size(bucket), dtype=torch.uint8), bucket) for bucket in buckets)
    return _send(backend, to, {**tree, "layout": layout, "rest": state.rest()}, packed)


def send_parcel(backend: Backend, to: int, parcel: Parcel, tree: dict[str, Any]) -> tuple[int, bytes]:
    """Send a copy as ``send_source`` would have then; ``tree`` is newer than the copy's own."""
    return _send(backend, to, {**tree, "copy": parcel.body}, parcel.buckets)


def _send(backend: Backend, to: int, tree: dict[str, Any], buckets: Iterable[torch.Tensor]) -> tuple[int, bytes]:
    body = values.encode(tree)
    digest = hashlib.blake2b(body, digest_size=16)
    total = _send_bytes(backend, to, body, _TREE)
    for packed in buckets:
        digest.update(memoryview(values.tensor_bytes(packed)))
        backend.send([packed], to, _TENSORS).wait()
        total += packed.numel()
    backend.send([_tensor(digest.digest())], to, _DIGEST).wait()
    return total, digest.digest()


def receive_source(backend: Backend, sender: int, state: State) -> tuple[dict[str, Any], int, bytes]:
    """Receive into ``state``, in place. Returns the sender's tree, bytes received and their digest."""
    body = _receive_bytes(backend, sender, _TREE)
    digest = hashlib.blake2b(body, digest_size=16)
    tree = values.decode(body)
    if "copy" in tree:
        tree = {**values.decode(tree["copy"]), **tree}
    state.adopt(tree["layout"])
    total = len(body)
    with torch.no_grad():
        for bucket in _buckets(list(_flat(state.tensors(), tree["layout"]))):
            packed = torch.empty(_size(bucket), dtype=torch.uint8)
            backend.recv([packed], sender, _TENSORS).wait()
            digest.update(memoryview(values.tensor_bytes(packed)))
            _empty(packed, bucket)
            total += packed.numel()
    theirs = torch.empty(digest.digest_size, dtype=torch.uint8)
    backend.recv([theirs], sender, _DIGEST).wait()
    if values.tensor_bytes(theirs) != digest.digest():
        raise WorkerError(f"the state from rank {sender} arrived damaged")
    state.put_rest(tree["rest"])
    return tree, total, digest.digest()


def acknowledge(backend: Backend, to: int, digest: bytes) -> None:
    """Tell the leaver that its state is safe."""
    backend.send([_tensor(digest)], to, _ACK).wait()


def await_acknowledgement(backend: Backend, sender: int, digest: bytes) -> None:
    """Block until the joiner confirmed exactly what was sent."""
    theirs = torch.empty(len(digest), dtype=torch.uint8)
    backend.recv([theirs], sender, _ACK).wait()
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
        backend.send([part], to, tag).wait()
    return len(body)


def _receive_bytes(backend: Backend, sender: int, tag: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    backend.recv([length], sender, tag).wait()
    body = torch.empty(int(length), dtype=torch.uint8)
    backend.recv([body], sender, tag).wait()
    return values.tensor_bytes(body)


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _flat(tensors: dict[str, dict[str, torch.Tensor]], layout: Layout) -> Iterable[torch.Tensor]:
    return (tensors[name][key] for name, entries in layout.items() for key, *_ in entries)


def _buckets(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Groups of tensors of at most a bucket's size; a larger tensor is a bucket of its own. Depends on the layout only."""
    bucket: list[torch.Tensor] = []
    for tensor in (t for t in tensors if t.numel()):
        if bucket and _size([*bucket, tensor]) > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _fill(buffer: torch.Tensor, bucket: list[torch.Tensor]) -> torch.Tensor:
    for tensor, (start, end) in zip(bucket, _spans(bucket), strict=True):
        buffer[start:end].copy_(values.as_bytes(tensor))
    return buffer


def _empty(buffer: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    for tensor, (start, end) in zip(bucket, _spans(bucket), strict=True):
        tensor.copy_(buffer[start:end].view(tensor.dtype).view(tensor.shape))


def _spans(bucket: list[torch.Tensor]) -> Iterable[tuple[int, int]]:
    start = 0
    for tensor in bucket:
        yield start, start + tensor.nbytes
        start += math.ceil(tensor.nbytes / _ALIGN) * _ALIGN  # a typed view needs an aligned start


def _size(bucket: list[torch.Tensor]) -> int:
    return sum(math.ceil(t.nbytes / _ALIGN) * _ALIGN for t in bucket)
