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
from collections.abc import Callable
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
    return {name: _plain(getattr(record, name)) for name in _names(type(record))}


def from_plain(cls: type[T], data: dict[str, Any]) -> T:
    """Plain dict -> an instance of ``cls``. Raises CodecError."""
    return cast("T", _record_reader(cast("Any", cls))(data))


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


_SIMPLE = frozenset({str, int, float, bool, type(None)})


def _plain(value: Any) -> Any:
    if type(value) in _SIMPLE:
        return value
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    return value


Reader = Callable[[Any, str], Any]
"""(JSON value, what to add to the field's name in an error, such as ``[rack]``) -> typed value. Made once a field: a map of a large job has
thousands of seats, and every agent reads every map."""


@cache
def _record_reader(cls: Any) -> Callable[[dict[str, Any]], Any]:
    hints = typing.get_type_hints(cls)
    readers = [(name, _reader(hints[name], f"{cls.__name__}.{name}")) for name in _names(cls)]

    def read(data: dict[str, Any]) -> Any:
        values = {name: reader(data[name], "") for name, reader in readers if name in data}
        try:
            return cls(**values)
        except TypeError as error:
            raise CodecError(f"{cls.__name__}: {error}") from None

    return read


def _reader(hint: Any, where: str) -> Reader:
    hint = getattr(hint, "__supertype__", hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value, _at: value
    if origin in (typing.Union, types.UnionType):
        inner = _reader(next(a for a in args if a is not type(None)), where)
        return lambda value, at: None if value is None else inner(value, at)
    if origin in (tuple, list, frozenset):
        return _sequence(origin, args, where)
    if origin is dict:
        return _mapping(args, where)
    if dataclasses.is_dataclass(hint):
        return _nested(hint, where)
    return _enumeration(hint, where) if issubclass(hint, Enum) else _scalar(hint, where)


def _sequence(origin: type, args: tuple[Any, ...], where: str) -> Reader:
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        each = [_reader(a, where) for a in args]

        def fixed(value: Any, at: str) -> Any:
            _expect(isinstance(value, list), where + at, "a list", value)
            _expect(len(value) == len(each), where + at, f"{len(each)} items", value)
            return tuple(read(v, at) for read, v in zip(each, value, strict=True))

        return fixed
    item = _reader(args[0], where)

    def read(value: Any, at: str) -> Any:
        _expect(isinstance(value, list), where + at, "a list", value)
        return origin([item(v, at) for v in value])

    return read


def _mapping(args: tuple[Any, ...], where: str) -> Reader:
    whole, item = getattr(args[0], "__supertype__", args[0]) is int, _reader(args[1], where)

    def read(value: Any, at: str) -> Any:
        _expect(isinstance(value, dict), where + at, "an object", value)
        return {int(k) if whole else k: item(v, f"{at}[{k}]") for k, v in value.items()}

    return read


def _nested(cls: Any, where: str) -> Reader:
    def read(value: Any, at: str) -> Any:
        _expect(isinstance(value, dict), where + at, "an object", value)
        return _record_reader(cls)(value)

    return read


def _enumeration(hint: type[Enum], where: str) -> Reader:
    def read(value: Any, at: str) -> Any:
        try:
            return hint(value)
        except ValueError:
            raise CodecError(f"{where}{at}: {value!r} is none of {[m.value for m in hint]}") from None

    return read


def _scalar(hint: type, where: str) -> Reader:
    def read(value: Any, at: str) -> Any:
        if type(value) is hint:
            return value
        if hint is float and type(value) is int:
            return float(value)
        _expect(isinstance(value, hint) and not isinstance(value, bool), where + at, hint.__name__, value)
        return value

    return read


def _expect(good: bool, where: str, wanted: str, value: Any) -> None:
    if not good:
        raise CodecError(f"{where}: expected {wanted}, got {value!r}")
