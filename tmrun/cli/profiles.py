"""Find and read the simulator's files: by the name of one that comes with tmrun (``llama3``), or by path.

May not know: what the simulator does with them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from tmrun.core.errors import UsageError
from tmrun.sim import costs, failures, settings, trace
from tmrun.sim.compare import Strategies
from tmrun.sim.trace import Event

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parents[1]
FOLDERS = (_HERE / "configs" / "simulate", _HERE.parent / "configs" / "simulate")
"""In an installed tmrun, and in a clone."""


class _Checked(Protocol):
    def check(self, where: str) -> Any:
        """Relations between the values."""


T = TypeVar("T", bound=_Checked)


def failure_model(name: str) -> failures.FailureModel:
    """Raises UsageError."""
    return _toml(failures.FailureModel, _find(name, "failures", "--failures"))


def cost_model(name: str) -> costs.Costs:
    """A TOML file, the JSON that ``tmrun history -o json`` prints, or the JSON lines of ``make bench``. Raises UsageError."""
    path = _find(name, "costs", "--costs")
    if path.suffix not in (".json", ".jsonl"):
        return _toml(costs.Costs, path)
    return costs.from_history(cost_model("paper"), _measured(path), path.name)


def _measured(path: Path) -> list[Any]:
    """Rows of ``tmrun history``: a job's, or those that the bench kept of each of its trials."""
    text = _read(path)
    try:
        if path.suffix == ".jsonl":
            trials = [json.loads(line) for line in text.splitlines() if line.strip()]
            return [t["phases"] for t in trials if isinstance(t, dict) and t.get("phases") and t.get("outcome") == "recovered"]
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    rows = document.get("history") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise UsageError(f"{path}: no `history` in it; expected the output of `tmrun history -o json`")
    return rows


def strategies(name: str = "") -> Strategies:
    """The baselines. Raises UsageError."""
    return _toml(Strategies, Path(name) if name else _folder() / "strategies.toml")


def read_trace(path: Path) -> tuple[Event, ...]:
    """CSV or JSON lines. Raises UsageError."""
    return trace.parse(_read(path), str(path))


def save(path: Path, content: bytes) -> None:
    """Write what the user asked for, and say so. Raises UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    click.echo(f"wrote {path}", err=True)


def known(kind: str) -> list[str]:
    """Names of what comes with tmrun: ``failures`` or ``costs``."""
    return sorted(p.stem for p in (_folder() / kind).glob("*.toml"))


def _folder() -> Path:
    return next((f for f in FOLDERS if f.is_dir()), FOLDERS[0])


def _find(name: str, kind: str, flag: str) -> Path:
    if name in known(kind):
        return _folder() / kind / f"{name}.toml"
    path = Path(name)
    if path.is_file():
        return path
    raise UsageError(f"{flag} {name!r}: no such file, and not one of {', '.join(known(kind))}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file in UTF-8") from None


def _toml(cls: type[T], path: Path) -> T:
    try:
        table = tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    value: T = settings.read(cls, table, str(path)).check(str(path))
    return value
