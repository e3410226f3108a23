"""Pictures of simulations as SVG text: waste by strategy over scale, where it goes, ETTR over the number of standbys, a week's timeline.

May not know: files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tmrun.sim.ledger import Outcome, Span, Term
from tmrun.sim.sizing import Point
from tmrun.sim.svg import FAINT, GREY, INK, Canvas, Scale, spread, ticks
from tmrun.sim.trace import Event, Fault

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
_OURS = ("#0b4f8a", "#1976c4", "#4ba3e3", "#8cc6f0", "#b5dcf7")
_OTHERS = ("#6b0f1a", "#d1495b", "#f78154", "#9a7b2f", "#7a9a3a", "#7a5195", "#5c6b80")
WEEK_S = 7 * 86_400.0


def colours(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Strategy -> colour: blues are tmrun."""
    names = list(dict.fromkeys(o.strategy for o in outcomes))
    ours, others = [n for n in names if n.startswith("tmrun")], [n for n in names if not n.startswith("tmrun")]
    return {n: _OURS[i % len(_OURS)] for i, n in enumerate(ours)} | {n: _OTHERS[i % len(_OTHERS)] for i, n in enumerate(others)}


def over_scale(by_gpus: Mapping[int, Sequence[Outcome]], subtitle: str) -> str:
    """Share of all paid GPU-hours that did nothing new, by job size."""
    sizes = sorted(by_gpus)
    everything = [o for g in sizes for o in by_gpus[g]]
    canvas = Canvas(960, 540)
    _title(canvas, "Wasted GPU time by strategy and scale", subtitle)
    left, right, top, bottom = 62.0, 610.0, 74.0, 482.0
    highest = max(o.waste_share for o in everything) * 100 * 1.08
    x, y = Scale(sizes[0], sizes[-1], left + 14, right, log=True), Scale(0, highest, bottom, top)
    _y_axis(canvas, y, left, right, "%")
    for gpus in sizes:
        canvas.line(x(gpus), bottom, x(gpus), bottom + 5, GREY)
        canvas.text(x(gpus), bottom + 20, size_text(gpus), anchor="middle", fill=GREY)
    canvas.text((left + right) / 2, bottom + 42, "GPUs of the job", anchor="middle", fill=GREY)
    tint = colours(everything)
    lasts: list[tuple[float, Outcome]] = []
    for name, colour in tint.items():
        line = [(x(g), y(o.waste_share * 100), o) for g in sizes for o in by_gpus[g] if o.strategy == name]
        canvas.curve([(px, py) for px, py, _ in line], colour, 2.6 if name.startswith("tmrun") else 1.8)
        for px, py, o in line:
            canvas.dot(px, py, colour, tip=f"{o.label}: {o.waste_share:.2%} at {o.gpus:,} GPUs")
        lasts.append((line[-1][1], line[-1][2]))
    for (py, o), ly in zip(lasts, spread([p for p, _ in lasts], 17, top, bottom), strict=True):
        canvas.line(right + 4, py, right + 18, ly, tint[o.strategy], 1)
        canvas.text(right + 22, ly + 4, f"{o.label}  {o.waste_share * 100:.1f} %", size=11.5, fill=tint[o.strategy])
    return canvas.render()


def where_it_goes(outcomes: Sequence[Outcome], subtitle: str) -> str:
    """Stacked bars: GPU-hours a week that each strategy wastes, by term."""
    rows = sorted(outcomes, key=lambda o: o.week_wasted)
    left, right, top, step = 270.0, 900.0, 112.0, 30.0
    canvas = Canvas(960, top + step * len(rows) + 64)
    _title(canvas, f"Where the GPU-hours go, {size_text(rows[0].gpus)} GPUs, a week", subtitle)
    used = [t for t in TERM_COLOURS if any(o.gpu_hours[t] > 0 for o in rows)]
    cx, cy = left, 74.0
    for term in used:
        width = 26 + 6.6 * len(term.value)
        if cx + width > 950:
            cx, cy = left, cy + 18
        canvas.rect(cx, cy - 9, 11, 11, TERM_COLOURS[term])
        canvas.text(cx + 15, cy, term.value, size=11, fill=GREY)
        cx += width
    x = Scale(0, max(o.week_wasted for o in rows) * 1.1 or 1.0, left, right)
    bottom = top + step * len(rows)
    for tick in ticks(0, x.high):
        canvas.line(x(tick), top - 6, x(tick), bottom)
        canvas.text(x(tick), bottom + 18, hours_text(tick), anchor="middle", fill=GREY, size=11)
    canvas.text((left + right) / 2, bottom + 40, "GPU-hours a week that did nothing new", anchor="middle", fill=GREY)
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


def over_standbys(points: Sequence[Point], simulated: Sequence[Outcome], gpus: int, nproc: int, subtitle: str) -> str:
    """What pools cost and save (closed form), and the ETTR that was simulated for some of them."""
    canvas = Canvas(960, 520)
    _title(canvas, f"How many standbys, {size_text(gpus)} GPUs", subtitle)
    left, right, top, bottom = 76.0, 900.0, 96.0, 452.0
    x = Scale(points[0].standby, points[-1].standby or 1, left + 10, right - 10)
    y = Scale(0, max(p.total for p in points) * 1.08 or 1.0, bottom, top)
    _y_axis(canvas, y, left, right, "", text=hours_text)
    canvas.text(left, top - 10, "GPU-hours a week", fill=GREY, size=11)
    for tick in ticks(points[0].standby, points[-1].standby, 10):
        if tick == int(tick):
            canvas.text(x(tick), bottom + 20, f"{tick:.0f}", anchor="middle", fill=GREY)
    canvas.text((left + right) / 2, bottom + 44, "standby nodes", anchor="middle", fill=GREY)
    for values, colour, dash in (
        ([p.held for p in points], GREY, "5 4"),
        ([p.waited for p in points], TERM_COLOURS[Term.REFILL], "5 4"),
        ([p.total for p in points], _OURS[1], ""),
    ):
        canvas.curve([(x(p.standby), y(v)) for p, v in zip(points, values, strict=True)], colour, 2 if dash else 3, dash)
    legend = (("held in reserve", GREY), ("waiting because too few were warm", TERM_COLOURS[Term.REFILL]), ("both", _OURS[1]))
    cx = right - 470
    for words, colour in legend:
        canvas.line(cx, top - 14, cx + 22, top - 14, colour, 3)
        canvas.text(cx + 27, top - 10, words, size=11.5, fill=GREY)
        cx += 50 + 6.2 * len(words)
    best = min(points, key=lambda p: (p.total, p.standby))
    canvas.line(x(best.standby), top, x(best.standby), bottom, _OURS[1], 1, "2 3")
    canvas.dot(x(best.standby), y(best.total), _OURS[1], 6, f"{best.standby} standbys")
    anchor = "start" if x(best.standby) < (left + right) / 2 else "end"
    canvas.text(
        x(best.standby) + (10 if anchor == "start" else -10), top + 16, f"least waste: {best.standby} standbys", bold=True, anchor=anchor
    )
    for o in simulated:
        k = o.standby_gpus // nproc
        if points[0].standby <= k <= points[-1].standby:
            waited = (o.gpu_hours[Term.REFILL] + o.gpu_hours[Term.STANDBY]) * WEEK_S / o.wall_s
            canvas.dot(x(k), y(min(waited, y.high)), INK, 4, f"simulated, {k} standbys: ETTR {o.ettr:.4f}")
            canvas.text(x(k) + 7, y(min(waited, y.high)) - 7, f"ETTR {o.ettr:.3f}", size=11)
    return canvas.render()


def ettr_over_standbys(outcomes: Sequence[Outcome], nproc: int, subtitle: str) -> str:
    """Simulated ETTR of tmrun over the number of standbys, the baselines as lines across."""
    ours = sorted((o for o in outcomes if o.strategy.removeprefix("tmrun-").isdecimal()), key=lambda o: o.standby_gpus)
    others = [o for o in outcomes if not o.strategy.startswith("tmrun")]
    canvas = Canvas(960, 500)
    _title(canvas, f"Effective training time over standbys, {size_text(outcomes[0].gpus)} GPUs", subtitle)
    left, right, top, bottom = 66.0, 610.0, 74.0, 440.0
    low = min(o.ettr for o in outcomes)
    y = Scale(max(0.0, low - (1 - low) * 0.08), 1.0, bottom, top)
    x = Scale(0, max(o.standby_gpus for o in ours) / nproc or 1.0, left + 12, right)
    _y_axis(canvas, y, left, right, "", text=lambda v: f"{v:.2f}" if y.high - y.low > 0.04 else f"{v:.3f}")
    labels = [(y(o.ettr), o.label, o.ettr, colours(outcomes)[o.strategy]) for o in others]
    for py, _, _, colour in labels:
        canvas.line(left, py, right, py, colour, 1.6, "6 4")
    canvas.curve([(x(o.standby_gpus / nproc), y(o.ettr)) for o in ours], _OURS[1], 3)
    for o in ours:
        k = o.standby_gpus // nproc
        canvas.dot(x(k), y(o.ettr), _OURS[1], 5, f"{o.label}: ETTR {o.ettr:.4f}")
        canvas.text(x(k), bottom + 20, str(k), anchor="middle", fill=GREY)
    canvas.text((left + right) / 2, bottom + 44, "standby nodes", anchor="middle", fill=GREY)
    labels.append((y(ours[-1].ettr), "tmrun", ours[-1].ettr, _OURS[1]))
    for (py, label, ettr, colour), ly in zip(labels, spread([e[0] for e in labels], 17, top, bottom), strict=True):
        canvas.line(right + 4, py, right + 18, ly, colour)
        canvas.text(right + 22, ly + 4, f"{label}  {ettr:.3f}", size=11.5, fill=colour, bold=label == "tmrun")
    return canvas.render()


def timeline(outcomes: Sequence[Outcome], trace: Sequence[Event], subtitle: str) -> str:
    """One week, one row a strategy: coloured where the job did not train; above, the faults."""
    end = min(WEEK_S, outcomes[0].wall_s)
    left, right, top, step = 270.0, 880.0, 118.0, 34.0
    canvas = Canvas(960, top + step * len(outcomes) + 80)
    days = end / 86_400
    _title(canvas, f"{'One week' if days == 7 else f'{days:.3g} days'} on {size_text(outcomes[0].gpus)} GPUs", subtitle)
    x, bottom = Scale(0, end, left, right), top + step * len(outcomes)
    for day in range(math.ceil(days) + 1):
        if day * 86_400 <= end:
            canvas.line(x(day * 86_400), top - 8, x(day * 86_400), bottom)
            canvas.text(x(day * 86_400), bottom + 18, f"day {day}", anchor="middle", size=11, fill=GREY)
    canvas.text(left - 8, top - 14, "faults", anchor="end", size=11, fill=GREY)
    for event in trace:
        if event.time_s < end:
            height = 5 if event.kind in (Fault.DRAIN, Fault.ALARM, Fault.SLOW) else 9 if len(event.hosts) == 1 else 15
            canvas.rect(x(event.time_s) - 0.5, top - 9 - height, 1.2, height, INK, tip=f"{event.kind.value} {event.cause} {event.hosts}")
    for i, o in enumerate(outcomes):
        py = top + i * step
        canvas.text(left - 8, py + 20, o.label, anchor="end", bold=o.strategy.startswith("tmrun"))
        canvas.rect(left, py + 4, right - left, step - 9, "#e3f2e6")
        for span in o.spans:
            if span.start_s < end:
                _span(canvas, x, span, py, step)
        canvas.text(right + 6, py + 20, f"ETTR {o.ettr:.3f}", size=11, fill=GREY)
    used = [t for t in TERM_COLOURS if any(s.term is t and s.start_s < end for o in outcomes for s in o.spans)]
    cx = left
    canvas.rect(cx, bottom + 34, 11, 11, "#e3f2e6")
    canvas.text(cx + 15, bottom + 43, "training", size=11, fill=GREY)
    cx += 80
    for term in used:
        canvas.rect(cx, bottom + 34, 11, 11, TERM_COLOURS[term])
        canvas.text(cx + 15, bottom + 43, term.value, size=11, fill=GREY)
        cx += 28 + 6.6 * len(term.value)
    canvas.text(left, bottom + 64, "Pauses shorter than a pixel are drawn one pixel wide.", size=10, fill=GREY)
    return canvas.render()


def _span(canvas: Canvas, x: Scale, span: Span, py: float, step: float) -> None:
    width = max(1.0, x(min(span.end_s, x.high)) - x(span.start_s))
    tip = f"{span.term.value} {span.end_s - span.start_s:,.0f} s at {span.start_s / 3600:.1f} h"
    canvas.rect(x(span.start_s), py + 4, width, step - 9, TERM_COLOURS[span.term], tip=tip)


def _title(canvas: Canvas, title: str, subtitle: str) -> None:
    canvas.text(24, 30, title, size=19, bold=True)
    canvas.text(24, 50, subtitle, size=12, fill=GREY)


def _y_axis(canvas: Canvas, y: Scale, left: float, right: float, unit: str, text: object = None) -> None:
    for tick in ticks(y.low, y.high):
        words = text(tick) if callable(text) else f"{tick:g} {unit}".strip()
        canvas.line(left, y(tick), right, y(tick), FAINT)
        canvas.text(left - 7, y(tick) + 4, words, anchor="end", fill=GREY, size=11)


def size_text(gpus: int) -> str:
    """65536 -> ``64K``."""
    return f"{gpus // 1024}K" if gpus >= 1024 and gpus % 1024 == 0 else f"{gpus:,}"


def hours_text(hours: float) -> str:
    """1234567 -> ``1.23 M``."""
    if hours >= 1e6:
        return f"{hours / 1e6:.3g} M"
    return f"{hours / 1e3:.3g} k" if hours >= 1e4 else f"{hours:,.0f}"
