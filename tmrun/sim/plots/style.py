"""What all pictures share: colours of terms and strategies, titles, axes, legends, how numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tmrun.sim.ledger import Outcome, Term
from tmrun.sim.svg import FAINT, GREY, INK, Canvas, Scale, spread, text_width, ticks

TERM_COLOURS: Mapping[Term, str] = {
    Term.STANDBY: "#b8c4ce",
    Term.CHECKPOINT: "#8d99ae",
    Term.SNAPSHOT: "#5c6b80",
    Term.DETECT: "#f2c14e",
    Term.DECIDE: "#f78154",
    Term.SWITCH: "#3a86c8",
    Term.REDO: "#7a5195",
    Term.REFILL: "#d1495b",
    Term.RESTART: "#6b0f1a",
    Term.DEGRADED: "#9bc53d",
    Term.ALARM: "#e377c2",
}
"""Every term but useful time, in the order in which bars are stacked."""
OURS, OURS_PALE = "#1976c4", "#9cc8ee"
_OTHERS = ("#6b0f1a", "#d1495b", "#f78154", "#9a7b2f", "#7a9a3a", "#7a5195", "#5c6b80")
WEEK_S = 7 * 86_400.0
LABEL_GAP = 17.0


def colours(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Strategy -> colour: blue is tmrun."""
    names = list(dict.fromkeys(o.strategy for o in outcomes))
    others = [n for n in names if not n.startswith("tmrun")]
    return dict.fromkeys(names, OURS) | {n: _OTHERS[i % len(_OTHERS)] for i, n in enumerate(others)}


def title(canvas: Canvas, words: str, subtitle: str) -> None:
    """At the top left."""
    canvas.text(24, 30, words, size=19, bold=True)
    canvas.text(24, 50, subtitle, size=12, fill=GREY)


def y_axis(canvas: Canvas, y: Scale, left: float, right: float, what: str, text: Callable[[float], str], at: Sequence[float] = ()) -> None:
    """Lines across, with their values, and above them what they count."""
    for tick in at or ticks(y.low, y.high):
        canvas.line(left, y(tick), right, y(tick), FAINT)
        canvas.text(left - 7, y(tick) + 4, text(tick), anchor="end", fill=GREY, size=11)
    canvas.text(24, min(y.start, y.end) - 12, what, fill=GREY, size=11)


def x_axis(canvas: Canvas, x: Scale, bottom: float, what: str, at: Mapping[float, str]) -> None:
    """Marks with their words, and below them what they count."""
    canvas.line(x.start, bottom, x.end, bottom, GREY)
    for value, words in at.items():
        canvas.line(x(value), bottom, x(value), bottom + 5, GREY)
        canvas.text(x(value), bottom + 20, words, anchor="middle", fill=GREY, size=11)
    canvas.text((x.start + x.end) / 2, bottom + 42, what, anchor="middle", fill=GREY)


def legend(canvas: Canvas, left: float, right: float, top: float, entries: Mapping[str, str]) -> float:
    """Words with their colours, in as many lines as they need; where the next line would be."""
    x, y = left, top
    for words, colour in entries.items():
        width = 15 + text_width(words, 11)
        if x + width > right:
            x, y = left, y + 18
        canvas.rect(x, y - 9, 11, 11, colour)
        canvas.text(x + 15, y, words, size=11, fill=GREY)
        x += width + 16
    return y + 18


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a line, at its right end."""

    y: float
    words: str
    colour: str
    bold: bool = False


def labels(canvas: Canvas, found: Sequence[Label], right: float, top: float, bottom: float) -> None:
    """Beside the lines' ends, apart from each other. Words are dark whatever the colour: pale ones cannot be read."""
    for label, y in zip(found, spread([e.y for e in found], LABEL_GAP, top, bottom), strict=True):
        canvas.line(right + 4, label.y, right + 20, y, label.colour, 1.5)
        canvas.line(right + 20, y, right + 30, y, label.colour, 3)
        canvas.text(right + 36, y + 4, label.words, size=11.5, fill=INK, bold=label.bold)


def size_text(gpus: int) -> str:
    """65536 -> ``64K``."""
    return f"{gpus // 1024}K" if gpus >= 1024 and gpus % 1024 == 0 else f"{gpus:,}"


def hours_text(hours: float) -> str:
    """1234567 -> ``1.23 M``."""
    if hours >= 1e6:
        return f"{hours / 1e6:.3g} M"
    return f"{hours / 1e3:.3g} k" if hours >= 1e3 else f"{hours:,.0f}"
