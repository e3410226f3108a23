"""Pictures from rows, as SVG text: a panel an event, a line a system, its median as a dot on its range; growth as curves. Pure.

Time axes are logarithmic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.compare import report
from bench.compare.plan import EVENTS, STATES, SYSTEMS, TITLES
from bench.compare.report import Cell, Row
from tmrun.sim.svg import FAINT, GREY, Canvas, Scale, spread

_LEFT, _WIDE, _LINE, _TOP = 250, 430, 18, 30
_TALL = 170
"""Of a panel of curves."""
_LOW, _HIGH = 0.01, 200.0
_TICKS = (0.01, 0.1, 1.0, 10.0, 100.0)
_BAD = "#b00000"
_COLOURS = {
    "torchrun": "#8a8a8a",
    "ft_launcher": "#76b900",
    "inprocess": "#4d7a00",
    "torchft": "#e07b00",
    "tmrun-cold": "#6f9fd8",
    "tmrun": "#1f5fbf",
}
_CURVES = (("torchrun", "kill", ""), ("torchrun", "drain", "5,4"), ("tmrun", "kill", ""), ("tmrun", "drain", "5,4"))


def downtime(rows: Sequence[Row], title: str) -> str:
    """All settings and events of a suite."""
    panels = [
        (f"{EVENTS[event]}: {report.setting_text(setting)}", chosen)
        for setting in report.settings(rows)
        for event in EVENTS
        if (chosen := report.select(rows, event=event, **setting))
    ]
    height = 34 + sum(_TOP + _LINE * len(_lines(chosen)) + 26 for _, chosen in panels)
    canvas = Canvas(_LEFT + _WIDE + 120, height)
    canvas.text(10, 20, title, size=14, bold=True)
    top = 34.0
    for heading, chosen in panels:
        top = _panel(canvas, chosen, heading, top)
    return canvas.render()


def _lines(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    return [(s, t) for s in SYSTEMS for t in (True, False) if report.select(rows, system=s, tuned=t)]


def _panel(canvas: Canvas, rows: Sequence[Row], title: str, top: float) -> float:
    """Draws it; where the next one begins."""
    lines = _lines(rows)
    across = Scale(_LOW, _HIGH, _LEFT, _LEFT + _WIDE, log=True)
    floor = top + _TOP + _LINE * len(lines)
    canvas.text(10, top + 16, title, bold=True)
    for tick in _TICKS:
        canvas.line(across(tick), top + _TOP, across(tick), floor, FAINT)
        canvas.text(across(tick), floor + 14, f"{tick:g} s", size=10, fill=GREY, anchor="middle")
    for number, (system, tuned) in enumerate(lines):
        y = top + _TOP + _LINE * (number + 0.5)
        canvas.text(_LEFT - 8, y + 4, f"{TITLES[system]}{'' if tuned else ' (defaults)'}", size=11, anchor="end")
        _mark(canvas, report.cell(report.select(rows, system=system, tuned=tuned)), y, _COLOURS[system], across)
    return floor + 26


def _mark(canvas: Canvas, cell: Cell, y: float, colour: str, across: Scale) -> None:
    if cell.median is None:
        canvas.text(_LEFT + 6, y + 4, cell.text, size=11, fill=_BAD)
        return
    low, high = across(_shown(min(cell.downs))), across(_shown(max(cell.downs)))
    canvas.line(low, y, high, y, colour, 3)
    canvas.dot(across(_shown(cell.median)), y, colour, 4, tip=cell.text)
    canvas.text(high + 8, y + 4, f"{report.seconds(cell.median)} s", size=11)


def _shown(seconds: float) -> float:
    return min(max(seconds, _LOW), _HIGH)


def growth(rows: Sequence[Row], title: str) -> str:
    """Downtime over the size of the state, and over the number of nodes: a curve a system and event."""
    states = [(s, {"nodes": 2, "state": s}) for s in STATES]
    nodes = [(f"{n} nodes", {"nodes": n, "state": "small"}) for n in sorted({r["trial"]["nodes"] for r in rows})]
    canvas = Canvas(_WIDE + 260, 34 + 2 * (_TALL + 70))
    canvas.text(10, 20, title, size=14, bold=True)
    _curves(canvas, rows, states, "downtime over the state's size", 34)
    _curves(canvas, rows, nodes, "downtime over the number of nodes", 34 + _TALL + 70)
    return canvas.render()


def _curves(canvas: Canvas, rows: Sequence[Row], points: Sequence[tuple[str, Mapping[str, Any]]], title: str, top: float) -> None:
    up = Scale(_LOW, _HIGH, top + _TALL + 24, top + 24, log=True)
    across = Scale(0, max(1, len(points) - 1), 60, 60 + _WIDE)
    canvas.text(10, top + 12, title, bold=True)
    for tick in _TICKS:
        canvas.line(60, up(tick), 60 + _WIDE, up(tick), FAINT)
        canvas.text(54, up(tick) + 4, f"{tick:g} s", size=10, fill=GREY, anchor="end")
    for number, (label, _) in enumerate(points):
        canvas.text(across(number), top + _TALL + 42, label, size=11, anchor="middle")
    ends: list[tuple[str, float, float]] = []
    for system, event, dash in _CURVES:
        cells = [report.cell(report.select(rows, system=system, event=event, tuned=True, **setting)) for _, setting in points]
        dots = [(across(i), up(_shown(c.median))) for i, c in enumerate(cells) if c.median is not None]
        if dots:
            canvas.curve(dots, _COLOURS[system], 2, dash)
            ends.append((f"{system}, {EVENTS[event]}", *dots[-1]))
    for (name, x, _), y in zip(ends, spread([y for _, _, y in ends], 13, top, top + _TALL + 30), strict=True):
        canvas.text(x + 8, y + 4, name, size=11)
