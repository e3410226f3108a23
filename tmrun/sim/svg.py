"""Draw SVG by hand: shapes, axes, ticks. No dependency, and the same bytes for the same values. May not know: what is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

INK, GREY, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
FAMILIES = ("Inter", "Helvetica Neue", "Arial", "DejaVu Sans", "Liberation Sans", "Noto Sans", "sans-serif")
_QUOTED = ", ".join(f"'{name}'" for name in FAMILIES[:-1])
FONT = f'font-family="{_QUOTED}, {FAMILIES[-1]}"'


@dataclass(slots=True)
class Canvas:
    """A picture of so many pixels."""

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, *, tip: str = "", opacity: float = 1.0) -> None:
        """A filled box; ``tip`` shows on hover."""
        title = _tip(tip)
        shade = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        self.parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(w, 0):.2f}" height="{h:.2f}" fill="{fill}"{shade}>{title}</rect>')

    def line(self, x0: float, y0: float, x1: float, y1: float, stroke: str = FAINT, width: float = 1.0, dash: str = "") -> None:
        """A straight line."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x0:.2f}" y1="{y0:.2f}" x2="{x1:.2f}" y2="{y1:.2f}" stroke="{stroke}" stroke-width="{width:g}"{dashed}/>'
        )

    def curve(self, points: Sequence[tuple[float, float]], stroke: str, width: float = 2.0, dash: str = "") -> None:
        """Points joined by lines."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" stroke-linejoin="round"{dashed}/>'
        )

    def dot(self, x: float, y: float, fill: str, radius: float = 3.5, tip: str = "") -> None:
        """A marker."""
        self.parts.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}" fill="{fill}" stroke="white">{_tip(tip)}</circle>')

    def text(self, x: float, y: float, words: str, *, size: float = 12, fill: str = INK, anchor: str = "start", bold: bool = False) -> None:
        """One line of text; ``anchor`` start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}" {FONT}{weight}>{escape(words)}</text>'
        )

    def render(self) -> str:
        """The file's text."""
        size = f'width="{self.width:g}" height="{self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width:g} {self.height:g}">'
        return "\n".join([head, f'<rect {size} fill="white"/>', *self.parts, "</svg>", ""])


def _tip(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from ``low`` to ``high`` -> pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        low, high, value = (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values that cover the range."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; ``low`` above 0."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [v for p in powers for m in (1, 2, 5) if low <= (v := m * 10.0**p) <= high]


_NARROW, _WIDE = frozenset("fijlrtI.,:;'|()[]! /-"), frozenset("mwMW%@")


def text_width(words: str, size: float) -> float:
    """About as many pixels as the words take; fonts differ."""
    return size * sum(0.38 if c in _NARROW else 0.95 if c in _WIDE else 0.64 for c in words)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions of labels near the wanted ones that do not overlap; in the given order of ``wanted``."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], placed[-1] + gap if placed else low))
    over = max(0.0, placed[-1] - high) if placed else 0.0
    for j in range(len(placed) - 1, -1, -1):
        limit = high if j == len(placed) - 1 else placed[j + 1] - gap
        placed[j] = min(placed[j], limit) if over else placed[j]
    result = [0.0] * len(wanted)
    for i, y in zip(order, placed, strict=True):
        result[i] = y
    return result
