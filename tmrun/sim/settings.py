"""Plain tables (from TOML) -> the settings' dataclasses, with one line for every mistake: file, key, reason, what to do.

Built on the codec's typed reading; unlike stored records, an unknown key is an error here, because a human typed it.
May not know: files, what the settings mean.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from tmrun.core import codec
from tmrun.core.errors import UsageError

T = TypeVar("T")


def read(cls: type[T], table: Mapping[str, Any], name: str) -> T:
    """A TOML document -> ``cls``. Raises UsageError. Every number must be finite and not negative."""
    _known(cls, table, name, "")
    try:
        value = codec.from_plain(cls, dict(table))
    except codec.CodecError as error:
        raise UsageError(f"{name}: {_short(str(error))}") from None
    _positive(table, name, "")
    return value


def _short(text: str) -> str:
    """``Causes.rate: expected float, got 'x'`` without the class."""
    where, _, rest = text.partition(":")
    if "missing" in text:
        return f"{text.split('argument')[-1].lstrip('s: ')} is missing: add it"
    rest = rest.replace("expected float", "expected a number").replace("expected int", "expected a whole number")
    return f"{where.partition('.')[2] or where}:{rest}"


def _known(cls: Any, table: Mapping[str, Any], name: str, path: str) -> None:
    hints = typing.get_type_hints(cls)
    for key, value in table.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(hints)}"
            raise UsageError(f"{name}: unknown key {path}{key}; {hint}")
        inner = [a for a in (hints[key], *typing.get_args(hints[key])) if dataclasses.is_dataclass(a)]
        if inner and isinstance(value, dict):
            _known(inner[0], value, name, f"{path}{key}.")
        if inner and isinstance(value, list):
            for i, item in enumerate(value):
                if not isinstance(item, dict):
                    raise UsageError(f"{name}: {path}{key}[{i}]: expected a table, got {item!r}")
                _known(inner[0], item, name, f"{path}{key}[{i}].")


def _positive(value: Any, name: str, path: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _positive(item, name, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _positive(item, name, f"{path}[{i}]")
    elif isinstance(value, (int, float)) and not (0 <= value < math.inf):
        raise UsageError(f"{name}: {path} = {value}: expected a number >= 0")
