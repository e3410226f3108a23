"""Trees of plain values <-> bytes, without pickle.

For what ``state_dict()`` methods return: dict, list, tuple, set, int of any size, float, complex, str, bytes, bool, None, torch
tensors, dtypes and devices, numpy arrays and scalars, and the few containers that torch's schedulers keep (Counter, OrderedDict,
deque). Anything else is a WorkerError that says where it sits. Reading runs no code of the sender. May not know: what a value means.

Format: one tag byte, then a fixed or length-prefixed body (lengths are 8-byte little-endian).
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tmrun.core.errors import WorkerError

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z", deque: b"q"}
_SEQUENCE_OF: dict[bytes, Callable[[Iterable[Any]], Any]] = {tag: kind for kind, tag in _SEQUENCES.items()}
_MAPPINGS: dict[type, bytes] = {dict: b"d", OrderedDict: b"O", Counter: b"C"}
_MAPPING_OF: dict[bytes, Callable[[dict[Any, Any]], Any]] = {tag: kind for kind, tag in _MAPPINGS.items()}
_CONSTANTS: dict[bytes, bool | None] = {b"N": None, b"T": True, b"F": False}


def encode(value: Any, what: str = "value") -> bytes:
    """Tree -> bytes. Raises WorkerError naming ``what`` and the path of a value that cannot travel."""
    out: list[bytes] = []
    _write(out, value, what)
    return b"".join(out)


def decode(data: bytes) -> Any:
    """Bytes made by ``encode`` -> tree."""
    value, end = _read(data, 0)
    if end != len(data):
        raise WorkerError(f"{len(data) - end} bytes too many after an encoded value")
    return value


# -- writing ------------------------------------------------------------------------------------------------------------------------
def _write(out: list[bytes], value: Any, where: str) -> None:
    kind = type(value)
    if value is None or kind is bool:
        out.append(b"N" if value is None else b"T" if value else b"F")
    elif kind in _MAPPINGS:
        _write_mapping(out, _MAPPINGS[kind], value, where)
    elif kind in _SEQUENCES or kind is torch.Size:
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        _write_sequence(out, _SEQUENCES.get(kind, b"t"), items, where)
    elif (body := _scalar(value, kind)) is not None:
        out.append(body)
    else:
        _write_array(out, value, where)


def _scalar(value: Any, kind: type) -> bytes | None:
    if kind is int:
        return b"i" + _sized(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if kind is float:
        return b"f" + _FLOAT.pack(value)
    if kind is complex:
        return b"c" + _COMPLEX.pack(value.real, value.imag)
    if kind is str:
        return b"s" + _sized(value.encode("utf-8", "surrogatepass"))
    if kind in (bytes, bytearray):
        return b"b" + _sized(bytes(value))
    if kind is torch.dtype:
        return b"y" + _sized(str(value).removeprefix("torch.").encode())
    if kind is torch.device:
        return b"v" + _sized(str(value).encode())
    return None


def _write_mapping(out: list[bytes], tag: bytes, value: dict[Any, Any], where: str) -> None:
    out.append(tag + _LENGTH.pack(len(value)))
    for key, item in value.items():
        _write(out, key, f"{where} key")
        _write(out, item, f"{where}[{key!r}]")


def _write_sequence(out: list[bytes], tag: bytes, items: Iterable[Any], where: str) -> None:
    items = list(items)
    out.append(tag + _LENGTH.pack(len(items)))
    for index, item in enumerate(items):
        _write(out, item, f"{where}[{index}]")


def _write_array(out: list[bytes], value: Any, where: str) -> None:
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if plain.is_sparse or plain.is_quantized or hasattr(plain, "to_local"):
            raise WorkerError(f"{where} is a sparse, quantized or distributed tensor inside a state_dict; register its owner directly")
        out.append(b"x" + _sized(str(plain.dtype).removeprefix("torch.").encode()) + _shape(plain.shape) + _sized(tensor_bytes(plain)))
        return
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        tag = b"a" if isinstance(value, numpy.ndarray) else b"g"
        out.append(tag + _sized(value.dtype.str.encode()) + _shape(value.shape) + _sized(value.tobytes()))
        return
    raise WorkerError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot travel to a successor; "
        "let state_dict() return plain values, tensors and containers of them"
    )


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The raw bytes of a tensor, in C order; numpy is not needed."""
    plain = tensor.dtype is torch.uint8 and tensor.is_cpu and tensor.is_contiguous()  # what every step asks for needs no views
    flat = tensor if plain else as_bytes(tensor.detach().cpu())
    return ctypes.string_at(flat.data_ptr(), flat.numel()) if flat.numel() else b""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view (a copy only if the tensor is not contiguous)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _sized(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _shape(shape: Iterable[int]) -> bytes:
    sizes = tuple(shape)
    return struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes)


# -- reading ------------------------------------------------------------------------------------------------------------------------
def _read(data: bytes, at: int) -> tuple[Any, int]:
    tag, at = data[at : at + 1], at + 1
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if tag in _MAPPING_OF:
        return _read_mapping(data, at, _MAPPING_OF[tag])
    if tag in _SEQUENCE_OF:
        return _read_sequence(data, at, _SEQUENCE_OF[tag])
    reader = _READERS.get(tag)
    if reader is None:
        raise WorkerError(f"unknown tag {tag!r} in an encoded value; the two processes run different versions of tmrun")
    return reader(data, at)


def _read_mapping(data: bytes, at: int, kind: Callable[[dict[Any, Any]], Any]) -> tuple[Any, int]:
    count, at = _read_length(data, at)
    items: dict[Any, Any] = {}
    for _ in range(count):
        key, at = _read(data, at)
        items[key], at = _read(data, at)
    return (items if kind is dict else kind(items)), at


def _read_sequence(data: bytes, at: int, kind: Callable[[Iterable[Any]], Any]) -> tuple[Any, int]:
    count, at = _read_length(data, at)
    items: list[Any] = []
    for _ in range(count):
        item, at = _read(data, at)
        items.append(item)
    return (items if kind is list else kind(items)), at


def _read_length(data: bytes, at: int) -> tuple[int, int]:
    (length,) = _LENGTH.unpack_from(data, at)
    return int(length), at + 8


def _read_sized(data: bytes, at: int) -> tuple[bytes, int]:
    length, at = _read_length(data, at)
    body = data[at : at + length]
    if len(body) != length:
        raise WorkerError(f"an encoded value ends {length - len(body)} bytes early")
    return body, at + length


def _read_shape(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    dims, at = _read_length(data, at)
    return struct.unpack_from(f"<{dims}Q", data, at), at + 8 * dims


def _read_int(data: bytes, at: int) -> tuple[int, int]:
    body, at = _read_sized(data, at)
    return int.from_bytes(body, "little", signed=True), at


def _read_float(data: bytes, at: int) -> tuple[float, int]:
    return float(_FLOAT.unpack_from(data, at)[0]), at + 8


def _read_complex(data: bytes, at: int) -> tuple[complex, int]:
    return complex(*_COMPLEX.unpack_from(data, at)), at + 16


def _read_str(data: bytes, at: int) -> tuple[str, int]:
    body, at = _read_sized(data, at)
    return body.decode("utf-8", "surrogatepass"), at


def _read_dtype(data: bytes, at: int) -> tuple[torch.dtype, int]:
    name, at = _read_sized(data, at)
    dtype = getattr(torch, name.decode(), None)
    if not isinstance(dtype, torch.dtype):
        raise WorkerError(f"unknown dtype {name!r}")
    return dtype, at


def _read_device(data: bytes, at: int) -> tuple[torch.device, int]:
    name, at = _read_sized(data, at)
    return torch.device(name.decode()), at


def _read_tensor(data: bytes, at: int) -> tuple[torch.Tensor, int]:
    dtype, at = _read_dtype(data, at)
    shape, at = _read_shape(data, at)
    body, at = _read_sized(data, at)
    if not body:
        return torch.empty(shape, dtype=dtype), at
    return torch.frombuffer(bytearray(body), dtype=dtype).reshape(shape), at


def _read_ndarray(data: bytes, at: int) -> tuple[Any, int]:
    import numpy

    name, at = _read_sized(data, at)
    shape, at = _read_shape(data, at)
    body, at = _read_sized(data, at)
    return numpy.frombuffer(bytearray(body), dtype=numpy.dtype(name.decode())).reshape(shape), at


def _read_numpy_scalar(data: bytes, at: int) -> tuple[Any, int]:
    array, at = _read_ndarray(data, at)
    return array[()], at


_READERS: dict[bytes, Callable[[bytes, int], tuple[Any, int]]] = {
    b"i": _read_int,
    b"f": _read_float,
    b"c": _read_complex,
    b"s": _read_str,
    b"b": _read_sized,
    b"y": _read_dtype,
    b"v": _read_device,
    b"x": _read_tensor,
    b"a": _read_ndarray,
    b"g": _read_numpy_scalar,
}


_SUMMED = 1 << 13
"""Bytes that share one checksum."""


def sums(part: torch.Tensor) -> bytes:
    """Sums of 64-bit words of a flat tensor of bytes, one for every 8 KiB, at the speed of memory: a hash is slower than a network."""
    if part.storage_offset() % 8 or part.data_ptr() % 8:
        part = part.clone()
    even = part.numel() // _SUMMED * _SUMMED
    rest = part[even:].to(torch.int64)
    tail = (rest * torch.arange(1, rest.numel() + 1, device=part.device)).sum()
    return tensor_bytes(torch.cat([part[:even].view(torch.int64).view(-1, _SUMMED // 8).sum(1), tail[None]]))


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Of a distributed tensor the part that lives here, without waiting for it; any other as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def fingerprint(tensor: torch.Tensor) -> bytes:
    """Of the content; what changes places within 8 KiB may not show."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(sums(content), digest_size=16).digest()
