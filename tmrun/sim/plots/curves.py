"""Lines: waste over scale, ETTR over the number of standbys, what pools cost and save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tmrun.core.plural import many
from tmrun.sim.ledger import Outcome, Term
from tmrun.sim.plots.style import (
    OURS,
    OURS_PALE,
    TERM_COLOURS,
    WEEK_S,
    Label,
    colours,
    hours_text,
    labels,
    legend,
    size_text,
    title,
    x_axis,
    y_axis,
)
from tmrun.sim.sizing import Point
from tmrun.sim.svg import GREY, INK, Canvas, Scale, log_ticks, ticks


def over_scale(by_gpus: Mapping[int, Sequence[Outcome]], nproc: int, subtitle: str) -> str:
    """Share of all paid GPU-hours that did nothing new, by job size: tmrun with the pool that is best there, its other pools pale."""
    sizes = sorted(by_gpus)
    everything = [o for g in sizes for o in by_gpus[g] if o.waste_share > 0]
    canvas = Canvas(960, 584)
    title(canvas, "Wasted GPU time by strategy and scale", subtitle)
    left, right, top, bottom = 62.0, 590.0, 100.0, 500.0
    x = Scale(sizes[0], sizes[-1], left + 14, right, log=True)
    low, high = (pick(o.waste_share * 100 for o in everything) for pick in (min, max))
    y = Scale(low / 1.15, high * 1.15, bottom, top, log=True)
    y_axis(canvas, y, left, right, "% of all GPU-hours paid, log scale", lambda v: f"{v:g} %", log_ticks(y.low, y.high))
    x_axis(canvas, Scale(0, 1, left, right), bottom, "GPUs of the job", {})
    for gpus in sizes:
        canvas.line(x(gpus), bottom, x(gpus), bottom + 5, GREY)
        canvas.text(x(gpus), bottom + 20, size_text(gpus), anchor="middle", fill=GREY, size=11)
    tint, found = colours(everything), []
    for pale in (True, False):  # the pale ones below
        for name in dict.fromkeys(o.strategy for o in everything if o.pool is pale):
            line = [o for o in everything if o.strategy == name]
            _curve(canvas, x, y, line, OURS_PALE if pale else tint[name], 1.2 if pale else 1.8)
            if not pale:
                found.append(Label(y(line[-1].waste_share * 100), f"{line[-1].label}  {line[-1].waste_share:.1%}", tint[name]))
    best = [min(here, key=lambda o: o.waste_share) for g in sizes if (here := [o for o in by_gpus[g] if o.pool and o.waste_share > 0])]
    if best:
        last = best[-1]
        _curve(canvas, x, y, best, OURS, 3.2)
        words = f"tmrun, best pool ({many(last.standby_gpus // nproc, 'standby')})  {last.waste_share:.1%}"
        found.append(Label(y(last.waste_share * 100), words, OURS, bold=True))
        pools = sorted({o.standby_gpus // nproc for o in everything if o.pool})
        canvas.text(left, 568, f"Pale: tmrun with each pool ({', '.join(map(str, pools))} standbys).", size=10.5, fill=GREY)
    labels(canvas, found, right, top, bottom)
    return canvas.render()


def _curve(canvas: Canvas, x: Scale, y: Scale, line: Sequence[Outcome], colour: str, width: float) -> None:
    points = [(x(o.gpus), y(o.waste_share * 100)) for o in line]
    canvas.curve(points, colour, width)
    for (px, py), o in zip(points, line, strict=True):
        canvas.dot(px, py, colour, width + 1.5, tip=f"{o.label}: {o.waste_share:.2%} at {o.gpus:,} GPUs")


def over_standbys(points: Sequence[Point], simulated: Sequence[Outcome], gpus: int, nproc: int, subtitle: str) -> str:
    """What pools cost and save (closed form), and the ETTR that was simulated for some of them."""
    canvas = Canvas(960, 530)
    title(canvas, f"How many standbys, {size_text(gpus)} GPUs", subtitle)
    left, right, top, bottom = 76.0, 930.0, 122.0, 462.0
    x = Scale(points[0].standby, points[-1].standby or 1, left + 10, right - 10)
    y = Scale(0, max(p.total for p in points) * 1.08 or 1.0, bottom, top)
    y_axis(canvas, y, left, right, "GPU-hours a week", hours_text)
    whole = [t for t in ticks(x.low, x.high, 10) if t == int(t)]
    x_axis(canvas, x, bottom, "standby nodes", {t: f"{t:.0f}" for t in whole})
    lines = {
        "held in reserve": ([p.held for p in points], TERM_COLOURS[Term.CHECKPOINT], 2.0),
        "waiting because too few were warm": ([p.waited for p in points], TERM_COLOURS[Term.REFILL], 2.0),
        "both": ([p.total for p in points], OURS, 3.0),
    }
    for values, colour, width in lines.values():
        line = [(x(p.standby), y(v)) for p, v in zip(points, values, strict=True)]
        canvas.curve(line, colour, width)
        for px, py in line if len(points) <= 40 else ():
            canvas.dot(px, py, colour, width)
    legend(canvas, left, right, 80, {words: colour for words, (_, colour, _) in lines.items()})
    best = min(points, key=lambda p: (p.total, p.standby))
    at = x(best.standby)
    canvas.line(at, top, at, bottom, OURS, 1, "2 3")
    canvas.dot(at, y(best.total), OURS, 6, many(best.standby, "standby"))
    here = at < (left + right) / 2
    words = f"least waste: {many(best.standby, 'standby') if best.standby else 'no standby'}"
    canvas.text(at + (10 if here else -10), top + 14, words, bold=True, anchor="start" if here else "end")
    for o in simulated:
        k = o.standby_gpus // nproc
        if points[0].standby <= k <= points[-1].standby:
            waited = (o.gpu_hours[Term.REFILL] + o.gpu_hours[Term.STANDBY]) * WEEK_S / o.wall_s
            canvas.dot(x(k), y(min(waited, y.high)), INK, 4, f"simulated, {many(k, 'standby')}: ETTR {o.ettr:.4f}")
    if simulated:
        canvas.text(right, 80, "black: simulated on the coordinator", size=11, fill=INK, anchor="end")
    return canvas.render()


def ettr_over_standbys(outcomes: Sequence[Outcome], nproc: int, subtitle: str) -> str:
    """Simulated ETTR of tmrun over the number of standbys, the baselines as lines across."""
    ours = sorted((o for o in outcomes if o.pool), key=lambda o: o.standby_gpus)
    others = [o for o in outcomes if not o.strategy.startswith("tmrun")]
    canvas = Canvas(960, 520)
    title(canvas, f"Effective training time over standbys, {size_text(outcomes[0].gpus)} GPUs", subtitle)
    left, right, top, bottom = 66.0, 590.0, 100.0, 460.0
    low = min(o.ettr for o in outcomes)
    y = Scale(max(0.0, low - (1 - low) * 0.08), 1.0, bottom, top)
    x = Scale(0, max(o.standby_gpus for o in ours) / nproc or 1.0, left + 12, right - 6)
    digits = 2 if y.high - y.low > 0.04 else 3 if y.high - y.low > 0.004 else 4
    y_axis(canvas, y, left, right, "ETTR: useful time of the active GPUs / wall time", lambda v: f"{v:.{digits}f}")
    x_axis(canvas, x, bottom, "standby nodes", _apart(x, [o.standby_gpus // nproc for o in ours]))
    found = []
    for o in others:
        colour = colours(outcomes)[o.strategy]
        canvas.line(left, y(o.ettr), right, y(o.ettr), colour, 1.6, "6 4")
        found.append(Label(y(o.ettr), f"{o.label}  {o.ettr:.{digits + 1}f}", colour))
    canvas.curve([(x(o.standby_gpus / nproc), y(o.ettr)) for o in ours], OURS, 3)
    for o in ours:
        canvas.dot(x(o.standby_gpus // nproc), y(o.ettr), OURS, 5, f"{o.label}: ETTR {o.ettr:.4f}")
    found.append(Label(y(ours[-1].ettr), f"{ours[-1].label}  {ours[-1].ettr:.{digits + 1}f}", OURS, bold=True))
    labels(canvas, found, right, top, bottom)
    return canvas.render()


def _apart(x: Scale, counts: Sequence[int]) -> dict[float, str]:
    """Those whose words have room."""
    kept: dict[float, str] = {}
    for count in counts:
        if not kept or x(count) - x(next(reversed(kept))) >= 24:
            kept[float(count)] = str(count)
    return kept
