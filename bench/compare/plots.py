"""Pictures from rows, as SVG text: a panel an event, a line a system, its median as a dot on its range. Pure.

The time axis is logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.compare import report
from bench.compare.plan import EVENTS, SYSTEMS, TITLES
from bench.compare.report import Cell, Row

_LEFT, _WIDE, _LINE, _TOP = 270, 430, 18, 26
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
    width = _LEFT + _WIDE + 110
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{y}" fill="white"/>',
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
    share = (math.log10(min(max(value, _LOW), _HIGH)) - math.log10(_LOW)) / (math.log10(_HIGH) - math.log10(_LOW))
    return round(_LEFT + _WIDE * share, 1)
