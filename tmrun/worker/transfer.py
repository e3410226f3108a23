"""One rank's state, from a process that has it to one that takes over.

A *source* message has a tree of plain values, then all tensors packed into large buckets (a message each; hundreds of small sends cost
twenty times as much), then a digest of everything. A *needs* message is a tree alone. The receiver compares layouts first, copies in
place, and checks the digest; in a drain it sends the digest back, and only then may the leaver go.
May not know: when this happens, what the trees contain.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch

from tmrun.core.errors import WorkerError
from tmrun.worker import values
from tmrun.worker.comm_gloo import Gloo
from tmrun.worker.state import Layout, State

_BUCKET = 32 << 20
_ALIGN = 16
_TREE, _TENSORS, _DIGEST, _ACK, _NEEDS = 11, 12, 13, 14, 15


def send_source(backend: Gloo, to: int, state: State, tree: dict[str, Any]) -> tuple[int, bytes]:
    """Send the tree and all tensors of ``state``. Returns bytes sent and their digest."""
    layout = state.layout()
    digest = hashlib.blake2b(digest_size=16)
    body = values.encode({**tree, "layout": layout, "rest": state.rest()})
    total = _send_bytes(backend, to, body, _TREE)
    digest.update(body)
    for bucket in _buckets(list(_flat(state.tensors(), layout))):
        packed = torch.zeros(_size(bucket), dtype=torch.uint8)
        for tensor, (start, end) in zip(bucket, _spans(bucket), strict=True):
            packed[start:end].copy_(values.as_bytes(tensor))
        digest.update(memoryview(values.tensor_bytes(packed)))
        backend.send([packed], to, _TENSORS).wait()
        total += packed.numel()
    backend.send([_tensor(digest.digest())], to, _DIGEST).wait()
    return total, digest.digest()


def receive_source(backend: Gloo, sender: int, state: State) -> tuple[dict[str, Any], int, bytes]:
    """Receive into ``state``, in place. Returns the sender's tree, bytes received and their digest."""
    digest = hashlib.blake2b(digest_size=16)
    body = _receive_bytes(backend, sender, _TREE)
    digest.update(body)
    tree = values.decode(body)
    state.adopt(tree["layout"])
    total = len(body)
    with torch.no_grad():
        for bucket in _buckets(list(_flat(state.tensors(), tree["layout"]))):
            packed = torch.empty(_size(bucket), dtype=torch.uint8)
            backend.recv([packed], sender, _TENSORS).wait()
            digest.update(memoryview(values.tensor_bytes(packed)))
            for tensor, (start, end) in zip(bucket, _spans(bucket), strict=True):
                tensor.copy_(packed[start:end].view(tensor.dtype).view(tensor.shape))
            total += packed.numel()
    theirs = torch.empty(digest.digest_size, dtype=torch.uint8)
    backend.recv([theirs], sender, _DIGEST).wait()
    if values.tensor_bytes(theirs) != digest.digest():
        raise WorkerError(f"the state from rank {sender} arrived damaged")
    state.put_rest(tree["rest"])
    return tree, total, digest.digest()


def acknowledge(backend: Gloo, to: int, digest: bytes) -> None:
    """Tell the leaver that its state is safe."""
    backend.send([_tensor(digest)], to, _ACK).wait()


def await_acknowledgement(backend: Gloo, sender: int, digest: bytes) -> None:
    """Block until the joiner confirmed exactly what was sent."""
    theirs = torch.empty(len(digest), dtype=torch.uint8)
    backend.recv([theirs], sender, _ACK).wait()
    if values.tensor_bytes(theirs) != digest:
        raise WorkerError("the joiner confirmed a different state")


def send_needs(backend: Gloo, to: int, blob: bytes) -> int:
    """Send a vote's blob to the successor of the rank that cast it."""
    return _send_bytes(backend, to, blob, _NEEDS)


def receive_needs(backend: Gloo, sender: int) -> dict[str, Any]:
    """Receive a vote's blob, decoded."""
    needs: dict[str, Any] = values.decode(_receive_bytes(backend, sender, _NEEDS))
    return needs


def _send_bytes(backend: Gloo, to: int, body: bytes, tag: int) -> int:
    backend.send([torch.tensor([len(body)])], to, tag).wait()
    backend.send([_tensor(body)], to, tag).wait()
    return len(body)


def _receive_bytes(backend: Gloo, sender: int, tag: int) -> bytes:
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


def _spans(bucket: list[torch.Tensor]) -> Iterable[tuple[int, int]]:
    start = 0
    for tensor in bucket:
        yield start, start + tensor.nbytes
        start += math.ceil(tensor.nbytes / _ALIGN) * _ALIGN  # a typed view needs an aligned start


def _size(bucket: list[torch.Tensor]) -> int:
    return sum(math.ceil(t.nbytes / _ALIGN) * _ALIGN for t in bucket)
