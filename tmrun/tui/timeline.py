"""A migration, phase by phase: what is done, what is going on and what it waits for; afterwards where the pause went.

May not know: where the values come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tmrun.core.plural import many
from tmrun.core.ranklist import ranks_named
from tmrun.tui.styles import DIM, GOOD, TITLE, WARN, clip, seconds, size

PHASES = ("detect", "bind", "comm", "state", "redo")
"""How ``history`` splits a pause, in order."""
_TONE = {"detect": "color(166)", "bind": "color(134)", "comm": "color(30)", "state": "color(33)", "redo": "color(136)"}
_BAR = 24
_MARK = {"done": ("✓", GOOD), "now": ("▶", WARN), "next": ("·", DIM)}
MAX_MOVES = 4


def going_on(migration: Mapping[str, Any], width: int, since_s: float | None = None) -> list[Text]:
    """The migration that is going on. ``since_s``: how long the reader has seen it."""
    waited = f", for {seconds(since_s)}" if since_s is not None else ""
    head = Text(no_wrap=True)
    head.append(f"migration {migration['id']} -> epoch {migration['epoch']}: {migration['kind']}{waited}", TITLE)
    if migration["reason"]:
        head.append(f"  ({migration['reason']})", DIM)
    lines = [head, *_moves(migration["moves"])]
    lines += [_phase(p) for p in migration["phases"]]
    lines += [_transfer(t) for t in migration.get("transfers", ())]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _moves(moves: Sequence[Mapping[str, Any]]) -> list[Text]:
    lines = [
        Text(f"  slot {m['slot']} ({ranks_named(m['ranks'])})  {m['leaver']} -> {m['joiner']}", no_wrap=True) for m in moves[:MAX_MOVES]
    ]
    if len(moves) > MAX_MOVES:
        lines.append(Text(f"  and {many(len(moves) - MAX_MOVES, 'more slot')}", DIM))
    return lines or [Text("  nobody moves: the workers agree on a step and go on in place", DIM)]


def bar(done: float, total: float, width: int = _BAR, style: str = GOOD) -> Text:
    """``━━━━━╌╌╌╌``."""
    full = 0 if total <= 0 else min(width, round(width * done / total))
    return Text().append("━" * full, style).append("╌" * (width - full), DIM)


def _phase(phase: Mapping[str, Any]) -> Text:
    sign, style = _MARK[phase["state"]]
    line = Text(no_wrap=True).append(f"  {sign} {phase['name']:<8}", style)
    line.append_text(bar(phase["done"], phase["total"], style=style)).append(f" {phase['done']}/{phase['total']}")
    detail = size(phase["bytes"]) if phase.get("bytes") else phase["detail"]
    return line.append(f"  {detail}", DIM) if detail else line


def _transfer(one: Mapping[str, Any]) -> Text:
    rate = f" at {size(one['rate'])}/s" if one.get("rate") else ""
    left = f", {seconds(one['left_s'])} left" if one.get("left_s") is not None else ""
    line = Text(f"    {one['node']:<8} ", no_wrap=True).append_text(bar(one["done"], one["total"], style=_TONE["state"]))
    return line.append(f" {size(one['done'])} of {size(one['total'])}{rate}{left}")


def where_it_went(row: Mapping[str, Any], width: int) -> list[Text]:
    """A migration that is over: a line, and its pause as one bar split by phases."""
    head = Text(line(row, split=row["pause_s"] is None), no_wrap=True)
    head.truncate(width, overflow="ellipsis")
    if row["pause_s"] is None:
        return [head]
    room = max(10, min(60, width - 4))
    split, legend = Text("  ", no_wrap=True), Text("  ", no_wrap=True)
    known = {name: row[f"{name}_s"] or 0.0 for name in PHASES}
    whole = max(sum(known.values()), 1e-9)
    for name, value in known.items():
        split.append("█" * round(room * value / whole), _TONE[name])
        legend.append("█ ", _TONE[name]).append(f"{name} {seconds(value)}  ")
    for part in (split, legend):
        part.truncate(width)
    return [head, split, legend]


def line(row: Mapping[str, Any], *, split: bool = True) -> str:
    """A row of history in one line; ``split``: with the phases of its pause."""
    who = f" {row['leaver']} -> {row['joiner']} ({ranks_named(row['ranks'])})" if row["leaver"] else ""
    paused = "" if row["pause_s"] is None else f", paused {row['pause_s']:.2f} s" + (f" ({phases_text(row)})" if split else "")
    moved = f", {size(row['bytes'])} moved" if row.get("bytes") else ""
    return f"epoch {row['epoch']} {row['cause']}{clip(who, 120)}{paused}{moved}{_groups(row.get('groups'))}"


def _groups(fates: Mapping[str, Sequence[str]] | None) -> str:
    """A job with the default group only has nothing to tell: it is rebuilt each time."""
    if not fates or len(fates["rebuilt"]) + len(fates["kept"]) < 2:
        return ""
    return f", {many(len(fates['rebuilt']), 'group')} rebuilt, {len(fates['kept'])} kept"


def phases_text(row: Mapping[str, Any]) -> str:
    """``detect 0.01, bind 0.30, ...``."""
    return ", ".join(f"{name} {row[f'{name}_s']:.2f}" for name in PHASES if row.get(f"{name}_s") is not None)
