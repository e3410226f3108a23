"""Pictures from rows, as SVG text: a panel an event, a line a system, its median as a dot on its range; growth as curves. Pure.

Time axes are logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from bench.compare import report
from bench.compare.plan import EVENTS, STATES, SYSTEMS, TITLES
from bench.compare.report import Cell, Row

_LEFT, _WIDE, _LINE, _TOP = 270, 430, 18, 26
_TALL = 170
"""Of a panel of curves."""
_LOW, _HIGH = 0.01, 200.0
_COLOURS = {
    "torchrun": "#8a8a8a",
    "ft_launcher": "#76b900",
    "inprocess": "#4d7a00",
    "torchft": "#e07b00",
    "tmrun-cold": "#6f9fd8",
    "tmrun": "#1f5fbf",
}


def downtime(rows: Sequence[Row], title: str) -> str:
    """All settings and events of a suite."""
    panels: list[str] = []
    y = 34
    for setting in report.settings(rows):
        here = report.select(rows, **setting)
        for event in (e for e in EVENTS if report.select(here, event=e)):
            text, height = _panel(report.select(here, event=event), f"{EVENTS[event]}: {report.setting_text(setting)}", y)
            panels.append(text)
            y += height
    return _page(panels, title, y)


def growth(rows: Sequence[Row], title: str) -> str:
    """Downtime over the size of the state, and over the number of nodes: a line a system and event."""
    states = [(s, {"nodes": 2, "state": s}) for s in STATES]
    nodes = [(f"{n} nodes", {"nodes": n, "state": "small"}) for n in sorted({r["trial"]["nodes"] for r in rows})]
    return _page([_curves(rows, states, "state", 34), _curves(rows, nodes, "nodes", 34 + _TALL + 60)], title, 34 + 2 * (_TALL + 60))


def _curves(rows: Sequence[Row], points: Sequence[tuple[str, Mapping[str, Any]]], name: str, top: int) -> str:
    height: Callable[[float], float] = lambda seconds: round(top + 20 + _TALL * (1 - _share(seconds)), 1)  # noqa: E731
    place = [round(60 + _WIDE * i / max(1, len(points) - 1), 1) for i in range(len(points))]
    parts = [f'<text x="10" y="{top + 8}" font-weight="bold">downtime over {name}</text>']
    for exponent in range(-2, 3):
        y = height(10.0**exponent)
        parts.append(f'<line x1="60" x2="{60 + _WIDE}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="54" y="{y + 4}" text-anchor="end" fill="#666">{10.0**exponent:g} s</text>')
    parts += [
        f'<text x="{x}" y="{top + _TALL + 36}" text-anchor="middle">{escape(label)}</text>'
        for x, (label, _) in zip(place, points, strict=True)
    ]
    for system, event, dash in (("torchrun", "kill", ""), ("torchrun", "drain", "5,4"), ("tmrun", "kill", ""), ("tmrun", "drain", "5,4")):
        cells = [report.cell(report.select(rows, system=system, event=event, tuned=True, **setting)) for _, setting in points]
        dots = [(x, height(c.median)) for x, c in zip(place, cells, strict=True) if c.median is not None]
        if not dots:
            continue
        path = " ".join(f"{x},{y}" for x, y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[system]}" stroke-width="2" stroke-dasharray="{dash}"/>')
        parts.append(f'<text x="{dots[-1][0] + 8}" y="{dots[-1][1] + 4}">{escape(f"{system}, {EVENTS[event]}")}</text>')
    return "\n".join(parts)


def _page(panels: Sequence[str], title: str, height: int) -> str:
    width = _LEFT + _WIDE + 110
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="10" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
            *panels,
            "</svg>",
            "",
        ]
    )


def _panel(rows: Sequence[Row], title: str, top: int) -> tuple[str, int]:
    lines = [(s, t) for s in SYSTEMS for t in (True, False) if report.select(rows, system=s, tuned=t)]
    height = _TOP + _LINE * len(lines) + 26
    floor = top + _TOP + _LINE * len(lines)
    parts = [f'<text x="10" y="{top + 16}" font-weight="bold">{escape(title)}</text>']
    for exponent in range(-2, 3):
        x = _x(10.0**exponent)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top + _TOP}" y2="{floor}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{floor + 13}" text-anchor="middle" fill="#666">{10.0**exponent:g} s</text>')
    for number, (system, tuned) in enumerate(lines):
        y = top + _TOP + _LINE * number + _LINE // 2
        name = f"{TITLES[system]}{'' if tuned else ' (defaults)'}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts += _mark(report.cell(report.select(rows, system=system, tuned=tuned)), y, _COLOURS[system])
    return "\n".join(parts), height


def _mark(cell: Cell, y: int, colour: str) -> list[str]:
    if cell.median is None:
        return [f'<text x="{_LEFT + 6}" y="{y + 4}" fill="#b00000">{escape(cell.text)}</text>']
    low, high, middle = _x(min(cell.downs)), _x(max(cell.downs)), _x(cell.median)
    return [
        f'<line x1="{low}" x2="{high}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>',
        f'<circle cx="{middle}" cy="{y}" r="4" fill="{colour}"/>',
        f'<text x="{high + 8}" y="{y + 4}">{report.seconds(cell.median)} s</text>',
    ]


def _x(value: float) -> float:
    return round(_LEFT + _WIDE * _share(value), 1)


def _share(value: float) -> float:
    """Where on a logarithmic axis, 0 to 1."""
    return (math.log10(min(max(value, _LOW), _HIGH)) - math.log10(_LOW)) / (math.log10(_HIGH) - math.log10(_LOW))
