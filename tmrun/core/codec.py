"""Frozen dataclasses <-> JSON, driven by their type hints.

Written for values that travel: store records and agent-worker messages. Unknown fields are ignored and missing ones take their
default, so that two versions can talk; a value of the wrong type is an error that names the field.
May not know: keys, transports, what a record means.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from tmrun.core.errors import TmrunError

T = TypeVar("T")

SCHEMA = 1
"""Version of every record written; a reader refuses a higher one."""


class CodecError(TmrunError, ValueError):
    """A record that this version cannot read; says which field and why."""


def encode(record: object) -> str:
    """Dataclass instance -> compact JSON text with its schema version under ``v``."""
    return json.dumps({"v": SCHEMA, **to_plain(record)}, separators=(",", ":"), sort_keys=True)


def decode(cls: type[T], text: str) -> T:
    """JSON text -> an instance of ``cls``. Raises CodecError."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CodecError(f"{cls.__name__}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CodecError(f"{cls.__name__}: expected an object, got {type(data).__name__}")
    if data.get("v", SCHEMA) > SCHEMA:
        raise CodecError(f"{cls.__name__}: schema {data['v']} is newer than this tmrun's {SCHEMA}; upgrade tmrun on this host")
    return from_plain(cls, data)


def to_plain(record: object) -> dict[str, Any]:
    """Dataclass instance -> plain dict of JSON values."""
    assert dataclasses.is_dataclass(record) and not isinstance(record, type), record
    return {f.name: _plain(getattr(record, f.name)) for f in dataclasses.fields(record)}


def from_plain(cls: type[T], data: dict[str, Any]) -> T:
    """Plain dict -> an instance of ``cls``. Raises CodecError."""
    values = {}
    for name, hint in _hints(cast("Any", cls)).items():
        if name in data:
            values[name] = _typed(hint, data[name], f"{cls.__name__}.{name}")
    try:
        return cls(**values)
    except TypeError as error:
        raise CodecError(f"{cls.__name__}: {error}") from None


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    return value


def _typed(hint: Any, value: Any, where: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _typed(next(a for a in args if a is not type(None)), value, where)
    if origin in (tuple, list, frozenset):
        return _sequence(origin, args, value, where)
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return {_key(args[0], k): _typed(args[1], v, f"{where}[{k}]") for k, v in value.items()}
    return _scalar(hint, value, where)


def _sequence(origin: type, args: tuple[Any, ...], value: Any, where: str) -> Any:
    _expect(isinstance(value, list), where, "a list", value)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        _expect(len(value) == len(args), where, f"{len(args)} items", value)
        return tuple(_typed(a, v, where) for a, v in zip(args, value, strict=True))
    return origin(_typed(args[0], v, where) for v in value)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        _expect(isinstance(value, dict), where, "an object", value)
        return from_plain(cast("type[Any]", hint), value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise CodecError(f"{where}: {value!r} is none of {[m.value for m in hint]}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _expect(isinstance(value, hint) and not (hint is int and isinstance(value, bool)), where, hint.__name__, value)
    return value


def _key(hint: Any, key: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)
    return int(key) if hint is int else key


def _expect(good: bool, where: str, wanted: str, value: Any) -> None:
    if not good:
        raise CodecError(f"{where}: expected {wanted}, got {value!r}")
