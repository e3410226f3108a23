"""Rows in a file, one JSON object a line, appended as they come: an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "results"


def read(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line that was cut off by an interruption is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(row) + "\n")


def merge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a key, the newest; a failure of the bench itself never hides a result."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["outcome"] != "error" or row["key"] not in found:
            found[row["key"]] = row
    return list(found.values())
