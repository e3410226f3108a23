"""What befalls a job's machines, as a list of faults in time; read from CSV or JSON lines, or drawn by ``failures``.

    time_s,kind,hosts,cause,back_s
    3600,exit,17,faulty GPU,120           # the workers of host 17 end, its agent says so; a machine is in its place after 120 s
    7200.5,vanish,32-39;41,rack power,3600
    9000,drain,5,firmware,300             # 300 s after the notice another machine is there to take the place

Hosts are positions 0, 1, 2, ... in the allocation, standbys included. ``cause`` and ``back_s`` may be empty. JSON lines: same names.
May not know: files, how faults are survived.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tmrun.core.errors import UsageError

COLUMNS = ("time_s", "kind", "hosts", "cause", "back_s")
BACK_S = 120.0
"""Until a machine is there again, where a row does not say: a swap by the cluster manager (2 minutes)."""
MAX_HOST = 1_000_000


class Fault(str, Enum):
    """What happens, by how it shows."""

    EXIT = "exit"
    """Worker processes end on a host whose agent lives and tells."""
    VANISH = "vanish"
    """The host is gone without a word."""
    HANG = "hang"
    """A worker freezes; nobody tells."""
    SLOW = "slow"
    """A host becomes a straggler; the job goes on at its pace."""
    DRAIN = "drain"
    """Planned: an operator or the scheduler wants the host."""
    ALARM = "alarm"
    """A false positive: a healthy host is taken out."""
    SOFTWARE = "software"
    """The program itself fails; the error follows the ranks."""


PLANNED = frozenset({Fault.DRAIN})
EXPECTED = frozenset({Fault.DRAIN, Fault.ALARM, Fault.SLOW})
"""The job is alive while the host is replaced."""


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """``back_s``: seconds until a machine (this one, repaired, or another in its place) is at the position again."""

    time_s: float
    hosts: tuple[int, ...]
    kind: Fault
    cause: str = ""
    back_s: float = BACK_S

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.kind.value} at {';'.join(_spans(self.hosts))}" + (f" ({self.cause})" if self.cause else "")


def parse(text: str, name: str) -> tuple[Event, ...]:
    """A trace file's text -> events in time order; JSON lines when the first character is ``{``. Raises UsageError: file, line, reason."""
    rows = _json_rows(text, name) if text.lstrip().startswith("{") else _csv_rows(text, name)
    events = sorted(_event(row, name, line) for line, row in rows)
    if not events:
        raise UsageError(f"{name}: no faults in it; expected rows of {','.join(COLUMNS)}")
    return tuple(events)


def _csv_rows(text: str, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        return
    (number, first), *rest = lines
    header = [c.strip() for c in first.split(",")]
    missing, unknown = [c for c in COLUMNS[:3] if c not in header], [c for c in header if c not in COLUMNS]
    if missing or unknown:
        what = f"no column {missing[0]!r}" if missing else f"unknown column {unknown[0]!r}"
        raise UsageError(f"{name}:{number}: {what}; the first line must name the columns: {','.join(COLUMNS)}")
    for i, line in rest:
        values = next(csv.reader([line]))
        if len(values) > len(header):
            raise UsageError(f"{name}:{i}: {len(values)} values for {len(header)} columns; several hosts are joined by ';', not ','")
        yield i, dict(zip(header, (v.strip() for v in values), strict=False))


def _json_rows(text: str, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for i, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{name}:{i}: not JSON ({error}); expected one object a line") from None
        if not isinstance(row, dict):
            raise UsageError(f"{name}:{i}: expected an object such as {{'time_s': 60, 'kind': 'exit', 'hosts': [3]}}")
        unknown = [c for c in row if c not in COLUMNS]
        if unknown:
            raise UsageError(f"{name}:{i}: unknown field {unknown[0]!r}; known: {', '.join(COLUMNS)}")
        yield i, row


def _event(row: Mapping[str, Any], name: str, line: int) -> Event:
    where = f"{name}:{line}"
    kind = str(row.get("kind", ""))
    if kind not in {f.value for f in Fault}:
        raise UsageError(f"{where}: kind {kind!r} is none of {', '.join(f.value for f in Fault)}")
    back = row.get("back_s")
    back_s = BACK_S if back in (None, "") else _seconds(back, "back_s", where)
    hosts = _hosts(row.get("hosts", ""), where)
    return Event(_seconds(row.get("time_s", ""), "time_s", where), hosts, Fault(kind), str(row.get("cause") or ""), back_s)


def _seconds(value: object, column: str, where: str) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = -1.0
    if isinstance(value, bool) or not 0 <= seconds < math.inf:
        raise UsageError(f"{where}: {column} {value!r}: expected seconds, a number >= 0")
    return seconds


def _hosts(value: object, where: str) -> tuple[int, ...]:
    parts = [str(v) for v in value] if isinstance(value, list) else str(value).split(";")
    found: list[int] = []
    for part in parts:
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or int(last or first) < int(first) or int(last or first) > MAX_HOST:
            raise UsageError(f"{where}: hosts {value!r}: expected positions such as 17, 32-39 or 3;9")
        found += range(int(first), int(last or first) + 1)
    if not found:
        raise UsageError(f"{where}: hosts {value!r}: nobody is struck; expected positions such as 17, 32-39 or 3;9")
    return tuple(dict.fromkeys(found))


def write(events: Iterable[Event]) -> str:
    """The CSV that ``parse`` reads."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    for e in events:
        rows.writerow((f"{e.time_s:.3f}", e.kind.value, ";".join(_spans(e.hosts)), e.cause, f"{e.back_s:.0f}"))
    return out.getvalue()


def _spans(hosts: Sequence[int]) -> Iterator[str]:
    start = 0
    for i in range(1, len(hosts) + 1):
        if i == len(hosts) or hosts[i] != hosts[i - 1] + 1:
            yield str(hosts[start]) if i - start == 1 else f"{hosts[start]}-{hosts[i - 1]}"
            start = i
