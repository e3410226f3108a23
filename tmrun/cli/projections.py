"""How simulations and sizings look on a terminal and as JSON. Pure: values in, renderables and plain values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tmrun.core.planner import MAX_MOVES
from tmrun.core.plural import many
from tmrun.sim.ledger import Outcome, Term
from tmrun.sim.plots.style import size_text
from tmrun.sim.shape import Shape
from tmrun.sim.sizing import MOST, Case, Point, Wish

_WASTES = [t for t in Term if t is not Term.USEFUL]


def _table(*columns: str, title: str = "") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def simulations(runs: Mapping[int, Sequence[Outcome]], head: str, notes: Sequence[str], *, story: bool) -> RenderableType:
    """The largest size in full, the others beside it, and on demand what the coordinator said."""
    largest = runs[max(runs)]
    parts = [_simulation(largest, head, notes)]
    parts += [_scales(runs)] if len(runs) > 1 else []
    parts += [_story(largest)] if story else []
    return Group(*parts)


def _simulation(outcomes: Sequence[Outcome], head: str, notes: Sequence[str]) -> RenderableType:
    """One line a strategy, least waste first; the terms in per cent of what was paid."""
    rows = sorted(outcomes, key=lambda o: o.week_wasted)
    terms = [t for t in _WASTES if any(o.gpu_hours[t] > 0 for o in rows)]
    table = _table("STRATEGY", "ETTR", "WASTE GPU-h/week", "%", *(t.value.upper() for t in terms), "RESTARTS", "MOVES")
    for o in rows:
        shares = [_percent(o.gpu_hours[t] / o.paid) for t in terms]
        ours = o.strategy.startswith("tmrun")
        moves = str(o.counts.get("moves", 0)) if ours else "-"
        restarts = str(o.counts.get("restarts", 0) + o.counts.get("jobs ended", 0))
        name = Text(o.label, style="bold cyan" if ours else "")
        table.add_row(name, f"{o.ettr:.4f}", f"{o.week_wasted:,.0f}", _percent(o.waste_share), *shares, restarts, moves)
    sources = [Text(f"  {o.label}: {o.source}", style="dim") for o in rows if not o.strategy.startswith("tmrun")]
    legend = Text("ETTR: useful time of the active GPUs. % and terms: of all GPU-hours paid, standbys included.", style="dim")
    first = [o for o in rows if o.strategy.startswith("tmrun")][:1]
    seen = [Text(f"{o.label}: the paper's projection would count {o.seen_by_the_paper:.0%} of this waste (switch, standby)") for o in first]
    ended = [f"{o.label}: {many(n, 'time')}" for o in rows if (n := o.counts.get("jobs ended", 0))]
    given_up = [Text(f"The coordinator gave the job up and it was launched anew ({'; '.join(ended)}); --story tells why.")] if ended else []
    return Group(Text(head), *map(Text, notes), Text(), table, Text(), *seen, *given_up, legend, *sources)


def _story(outcomes: Sequence[Outcome]) -> RenderableType:
    """What happened and what the coordinator said, with the largest pool."""
    told = max((o for o in outcomes if o.pool), key=lambda o: o.standby_gpus, default=None)
    if told is None:
        return Group(Text(), Text("no story: no pool of tmrun is among these strategies"))
    lines = [Text(f"  day {int(t // 86_400)} {_clock(t % 86_400)}  {words}") for t, words in told.story]
    lines = lines or [Text("  no fault, nothing said")]
    return Group(Text(), Text(f"{told.label}: faults, and what its coordinator said", style="bold"), *lines)


def _clock(seconds: float) -> str:
    return f"{int(seconds // 3600):02d}:{int(seconds % 3600 // 60):02d}:{int(seconds % 60):02d}"


def _scales(runs: Mapping[int, Sequence[Outcome]]) -> RenderableType:
    """Waste in per cent, one column a size."""
    table = _table("WASTE %", *(size_text(g) for g in runs))
    labels = {o.strategy: o.label for outcomes in runs.values() for o in outcomes}
    for name, label in labels.items():
        found = {g: next((o for o in outcomes if o.strategy == name), None) for g, outcomes in runs.items()}
        table.add_row(label, *("-" if o is None else _percent(o.waste_share) for o in found.values()))
    return Group(Text(), table)


def _percent(share: float) -> str:
    return "-" if share == 0 else f"{share * 100:.2f}"


def document(runs: Mapping[int, Sequence[Outcome]], source: str, days: float, seed: int, notes: Sequence[str]) -> dict[str, Any]:
    """The JSON of ``tmrun simulate``."""
    return {
        "source": source,
        "days": days,
        "seed": seed,
        "notes": list(notes),
        "sizes": [{"gpus": gpus, "strategies": [outcome_value(o) for o in outcomes]} for gpus, outcomes in runs.items()],
    }


def outcome_value(o: Outcome) -> dict[str, Any]:
    """One strategy's run."""
    return {
        "strategy": o.strategy,
        "label": o.label,
        "source": o.source,
        "gpus": o.gpus,
        "standby_gpus": o.standby_gpus,
        "ettr": o.ettr,
        "waste_share": o.waste_share,
        "week_wasted_gpu_h": o.week_wasted,
        "gpu_hours": {t.value: o.gpu_hours[t] for t in Term},
        "counts": o.counts,
    }


def size_view(
    shape: Shape,
    best: Point,
    points: Sequence[Point],
    cases: Sequence[Case],
    wish: Wish,
    pays_from: int | None,
    simulated: Sequence[Outcome],
    source: str,
) -> RenderableType:
    """The verdict, the pools around the best one, the sensitivity, and the wish explained."""
    parts: list[RenderableType] = [Text(f"{shape.gpus:,} GPUs on {shape.nodes:,} nodes; {source}"), Text()]
    parts += [
        verdict(shape, best, points[0], pays_from),
        Text(),
        _pools(best, points),
        Text(),
        _sensitivity(best, cases),
        Text(),
        _wish(shape, wish),
    ]
    if simulated:
        parts += [Text(), _simulated(simulated, shape)]
    return Group(*parts)


def verdict(shape: Shape, best: Point, none: Point, pays_from: int | None) -> Text:
    """One or two sentences."""
    week = 168 * shape.nproc
    if best.standby == 0:
        why = f"a standby costs {week:,} GPU-hours a week, and without any only {none.waited:,.0f} are lost waiting"
        later = f"; with this failure model the first one pays from about {pays_from:,} nodes on" if pays_from else ""
        return Text.assemble(("no standby", "bold"), f" wastes least: {why}{later}")
    count, verb = many(best.standby, "standby"), "wastes" if best.standby == 1 else "waste"
    share = f"{best.standby / shape.nodes:.2%} of the nodes{', and no more were tried' if best.standby == MOST else ''}"
    words = f" ({share}) {verb} least: {best.total:,.0f} GPU-hours a week, {none.total - best.total:,.0f} less than none"
    return Text.assemble((count, "bold green"), words)


def _pools(best: Point, points: Sequence[Point]) -> Table:
    table = _table("STANDBYS", "HELD", "WAITED", "TOTAL", "FAULTS THAT FIND TOO FEW", title="pools, in GPU-hours a week")
    last = points[-1].standby
    shown = sorted({0, 1, 2, best.standby - 1, best.standby, best.standby + 1, 2 * best.standby, 4, 8} & set(range(last + 1)))
    for k in shown:
        p = points[k]
        style = "bold green" if k == best.standby else ""
        table.add_row(Text(str(k), style), f"{p.held:,.0f}", f"{p.waited:,.0f}", Text(f"{p.total:,.0f}", style), _often(p.stops))
    return table


def _often(stops: float) -> str:
    """How often in words a person can use."""
    if stops >= 1:
        return f"{stops:.1f} a week"
    if stops * 52 >= 1:
        return f"{stops * 52:.1f} a year"
    return "less than 1 a year"


def _sensitivity(best: Point, cases: Sequence[Case]) -> Table:
    title = "if an assumption is wrong, in GPU-hours a week"
    table = _table("IF", "BEST", "ITS WASTE", f"WITH {best.standby} INSTEAD", "REGRET", title=title)
    for c in cases:
        regret = abs(c.kept.total - c.best.total)
        table.add_row(c.what, str(c.best.standby), f"{c.best.total:,.0f}", f"{c.kept.total:,.0f}", f"{regret:,.0f}")
    return table


def _wish(shape: Shape, w: Wish) -> Table:
    table = _table("", "", title=f"--standby {w.text} for this job")
    table.show_header = False
    table.columns[1].justify = "left"
    table.columns[1].no_wrap = False
    table.add_row("is", f"{many(w.at.standby, 'node')}, {w.at.standby * shape.nproc:,} GPUs, {w.share:.2%} of all that you hold")
    table.add_row("costs", f"{w.at.held:,.0f} GPU-hours a week")
    table.add_row("saves", f"{w.none.waited - w.at.waited:,.0f} GPU-hours a week of waiting ({w.none.waited:,.0f} without standbys)")
    table.add_row("finds too few", f"{_often(w.at.stops)}; then everybody waits for a replacement")
    for name, nodes, covered in w.domains:
        anew = f"; more than {MAX_MOVES} at once restart all workers" if nodes > MAX_MOVES else ""
        table.add_row(f"a lost {name}", f"{many(nodes, 'node')}: {'covered' if covered else 'not covered'} by a full pool{anew}")
    gain = w.none.total - w.at.total
    table.add_row("against none", f"{abs(gain):,.0f} GPU-hours a week {'less' if gain >= 0 else 'more'} waste")
    extra = w.at.total - w.best.total
    line = "it is the best" if w.at.standby == w.best.standby else f"{extra:,.0f} GPU-hours a week more waste than with {w.best.standby}"
    table.add_row("against the best", line)
    return table


def _simulated(outcomes: Sequence[Outcome], shape: Shape) -> Table:
    table = _table(
        "STANDBYS", "ETTR", "HELD + REFILL GPU-h/week", "ALL WASTE", title=f"simulated, {many(shape.days, 'day')}, seed {shape.seed}"
    )
    for o in outcomes:
        part = (o.gpu_hours[Term.STANDBY] + o.gpu_hours[Term.REFILL]) * o.week_wasted / o.wasted if o.wasted else 0.0
        table.add_row(str(o.standby_gpus // shape.nproc), f"{o.ettr:.4f}", f"{part:,.0f}", f"{o.week_wasted:,.0f}")
    return table


def size_document(
    shape: Shape,
    best: Point,
    points: Sequence[Point],
    cases: Sequence[Case],
    wish: Wish,
    pays_from: int | None,
    simulated: Sequence[Outcome],
    source: str,
) -> dict[str, Any]:
    """The JSON of ``tmrun size``."""
    return {
        "source": source,
        "gpus": shape.gpus,
        "nodes": shape.nodes,
        "best": _point(best),
        "pays_from_nodes": pays_from,
        "pools": [_point(p) for p in points],
        "sensitivity": [{"if": c.what, "best": _point(c.best), "kept": _point(c.kept)} for c in cases],
        "wish": {
            "text": wish.text,
            **_point(wish.at),
            "share_of_paid": wish.share,
            "domains": [{"name": n, "nodes": k, "covered": c} for n, k, c in wish.domains],
        },
        "simulated": [outcome_value(o) for o in simulated],
    }


def _point(p: Point) -> dict[str, Any]:
    return {"standby": p.standby, "held_gpu_h": p.held, "waited_gpu_h": p.waited, "total_gpu_h": p.total, "stops_a_week": p.stops}
