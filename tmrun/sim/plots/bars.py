"""Bars: where each strategy's GPU-hours go, and one simulated week as a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tmrun.sim.ledger import Outcome, Span
from tmrun.sim.plots.style import TERM_COLOURS, WEEK_S, hours_text, legend, size_text, title, x_axis
from tmrun.sim.svg import GREY, INK, Canvas, Scale, ticks
from tmrun.sim.trace import EXPECTED, Event

TRAINING = "#e3f2e6"


def where_it_goes(outcomes: Sequence[Outcome], subtitle: str) -> str:
    """Stacked bars: GPU-hours a week that each strategy wastes, by term."""
    rows = sorted(outcomes, key=lambda o: o.week_wasted)
    used = [t for t in TERM_COLOURS if any(o.gpu_hours[t] > 0 for o in rows)]
    left, right, step = 270.0, 900.0, 30.0
    canvas = Canvas(960, 0)
    title(canvas, f"Where the GPU-hours go: {size_text(rows[0].gpus)} GPUs, a week", subtitle)
    top = legend(canvas, left, 950, 80, {t.value: TERM_COLOURS[t] for t in used}) + 8
    bottom = top + step * len(rows)
    canvas.height = bottom + 60
    x = Scale(0, max(o.week_wasted for o in rows) * 1.1 or 1.0, left, right)
    for tick in ticks(0, x.high):
        canvas.line(x(tick), top - 6, x(tick), bottom)
    x_axis(canvas, x, bottom, "GPU-hours a week that did nothing new", {t: hours_text(t) for t in ticks(0, x.high)})
    for i, o in enumerate(rows):
        py, at = top + i * step, left
        canvas.text(left - 8, py + 15, o.label, anchor="end", size=12, bold=o.strategy.startswith("tmrun"))
        for term in used:
            hours = o.gpu_hours[term] * WEEK_S / o.wall_s
            width = x(hours) - left
            canvas.rect(at, py + 2, width, step - 9, TERM_COLOURS[term], tip=f"{o.label}: {term.value} {hours:,.0f} GPU-h a week")
            at += width
        canvas.text(at + 5, py + 15, hours_text(o.week_wasted), size=11, fill=GREY)
    return canvas.render()


def timeline(outcomes: Sequence[Outcome], trace: Sequence[Event], subtitle: str) -> str:
    """One week, one row a strategy: coloured where the job did not train; above, the faults."""
    end = min(WEEK_S, outcomes[0].wall_s)
    left, right, top, step = 270.0, 860.0, 108.0, 34.0
    days, bottom = end / 86_400, top + step * len(outcomes)
    canvas = Canvas(960, 0)
    title(canvas, f"{'One week' if days == 7 else f'{days:.3g} days'} on {size_text(outcomes[0].gpus)} GPUs", subtitle)
    x = Scale(0, end, left, right)
    for day in range(int(days) + 1):
        canvas.line(x(day * 86_400), top - 8, x(day * 86_400), bottom)
    x_axis(canvas, x, bottom, "", {day * 86_400.0: f"day {day}" for day in range(int(days) + 1)})
    canvas.text(left - 8, top - 12, "faults", anchor="end", size=11, fill=GREY)
    for event in trace:
        if event.time_s < end:
            height = 5 if event.kind in EXPECTED else 10 if len(event.hosts) == 1 else 18
            canvas.rect(x(event.time_s) - 0.5, top - 9 - height, 1.2, height, INK, tip=event.text)
    canvas.text(right + 8, top - 12, "ETTR", size=11, fill=GREY)
    for i, o in enumerate(outcomes):
        py = top + i * step
        canvas.text(left - 8, py + 20, o.label, anchor="end", bold=o.strategy.startswith("tmrun"))
        canvas.rect(left, py + 4, right - left, step - 9, TRAINING)
        for span in o.spans:
            if span.start_s < end:
                _span(canvas, x, span, py, step)
        canvas.text(right + 8, py + 20, f"{o.ettr:.4f}", size=11, fill=GREY)
    used = [t for t in TERM_COLOURS if any(s.term is t and s.start_s < end for o in outcomes for s in o.spans)]
    below = legend(canvas, left, 950, bottom + 46, {"training": TRAINING} | {t.value: TERM_COLOURS[t] for t in used})
    whole = "" if math.isclose(end, outcomes[0].wall_s) else f" ETTR is of all {outcomes[0].wall_s / 86_400:g} days."
    for words in (
        f"Pauses shorter than a pixel are drawn one pixel wide.{whole}",
        "Faults: short is planned, a false alarm or a straggler; tall is several nodes at once.",
    ):
        canvas.text(left, below, words, size=10, fill=GREY)
        below += 15
    canvas.height = below
    return canvas.render()


def _span(canvas: Canvas, x: Scale, span: Span, py: float, step: float) -> None:
    width = max(1.0, x(min(span.end_s, x.high)) - x(span.start_s))
    tip = f"{span.term.value} {span.end_s - span.start_s:,.0f} s at {span.start_s / 3600:.1f} h"
    canvas.rect(x(span.start_s), py + 4, width, step - 9, TERM_COLOURS[span.term], tip=tip)
