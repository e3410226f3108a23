"""Tables from rows: medians with ranges, ratios to torchrun. Pure, but for the tables' looks in a terminal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.compare.plan import EVENTS, STATES, SYSTEMS, TITLES

Row = Mapping[str, Any]
BASE = "torchrun"
_SCALE = {
    "drain_propose_s": "drain: request to proposal (s)",
    "drain_votes_and_commit_s": "drain: proposal to commit (s)",
    "drain_seen_by_all_s": "drain: commit to seen by all (s)",
    "loss_votes_and_commit_s": "loss: proposal to commit (s)",
    "loss_seen_by_all_s": "loss: commit to seen by all (s)",
    "lost_leases": "lost leases",
    "txns": "transactions",
    "events": "watch events",
    "etcd_rss_mb": "etcd: memory (MB)",
    "etcd_cpu_share": "etcd: share of one core",
}
"""What bench/scale.py tells -> how it is called here."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What the repetitions of a case gave; times in seconds."""

    downs: tuple[float, ...]
    outcomes: tuple[str, ...]
    redone: tuple[int, ...]

    @property
    def median(self) -> float | None:
        """Of the trials that recovered, if most did."""
        return statistics.median(self.downs) if len(self.downs) * 2 > len(self.outcomes) else None

    @property
    def text(self) -> str:
        """Short, for a table."""
        if not self.outcomes:
            return ""
        if not self.downs:
            return statistics.mode(self.outcomes)
        lost = f", {len(self.outcomes) - len(self.downs)} of {len(self.outcomes)} failed" if self.failed else ""
        spread = f" [{seconds(min(self.downs))}–{seconds(max(self.downs))}]" if len(self.downs) > 1 else ""
        return f"{seconds(statistics.median(self.downs))}{spread}{lost}"

    @property
    def failed(self) -> int:
        """How many did not recover."""
        return len(self.outcomes) - len(self.downs)


def seconds(value: float) -> str:
    """Two significant digits or so, never less than 0."""
    value = max(0.0, value)
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def cell(rows: Iterable[Row]) -> Cell:
    """Of one case; trials that the bench itself could not carry out are left out."""
    counted = [r for r in rows if r["outcome"] != "error"]
    good = [r for r in counted if r["outcome"] == "recovered" and value(r) is not None]
    return Cell(
        tuple(value(r) or 0.0 for r in good),
        tuple(r["outcome"] for r in counted),
        tuple(r["figures"]["redone"] for r in good),
    )


def value(row: Row) -> float | None:
    """What a trial is judged by: the downtime; a straggler pauses nothing, it slows the steps down, by this factor in the end."""
    found: float | None = row["figures"]["slowdown" if row["trial"]["event"] == "straggler" else "downtime_s"]
    return found


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows whose trial has these values."""
    return [r for r in rows if all(r["trial"][k] == v for k, v in wanted.items())]


def ratio(mine: Cell, base: Cell) -> str:
    """As a fraction of torchrun's median; empty when one of them has none."""
    if mine.median is None or base.median is None or base.median <= 0:
        return ""
    return f"{max(0.0, mine.median) / base.median:.3f}"


def settings(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """What the rows vary besides system, tuning, event and repetition, in a stable order."""
    sizes = list(STATES)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        setting = {k: row["trial"][k] for k in ("nodes", "state", "compiled", "mbit", "netns")}
        found.setdefault((setting["nodes"], sizes.index(setting["state"]), setting["compiled"], setting["mbit"], setting["netns"]), setting)
    return [found[k] for k in sorted(found)]


def setting_text(setting: Mapping[str, Any]) -> str:
    """A heading."""
    parts = [f"{setting['nodes']} nodes × 1 process", f"{setting['state']} state"]
    if setting["compiled"] != "off":
        parts.append(f"torch.compile with a {setting['compiled']} kernel cache")
    if setting["mbit"]:
        parts.append(f"{setting['mbit']} Mbit/s a host")
    elif setting["netns"]:
        parts.append("a network namespace a host")
    return ", ".join(parts)


def comparison(rows: Sequence[Row], setting: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, lines) for one setting: a line a system and tuning, a column an event, times [range] and the ratio to torchrun tuned."""
    here = select(rows, **setting)
    events = [e for e in EVENTS if select(here, event=e)]
    bases = {e: cell(select(here, system=BASE, tuned=True, event=e)) for e in events}
    lines = []
    for system in SYSTEMS:
        for tuned in (True, False):
            mine = select(here, system=system, tuned=tuned)
            if not mine:
                continue
            cells = {e: cell(select(mine, event=e)) for e in events}
            lines.append([f"{TITLES[system]} ({'tuned' if tuned else 'defaults'})", *_texts(cells, bases, system), _redone(cells.values())])
    return ["", *(EVENTS[e] for e in events), "steps redone"], lines


def _texts(cells: Mapping[str, Cell], bases: Mapping[str, Cell], system: str) -> list[str]:
    texts = []
    for event, one in cells.items():
        share = "" if event == "straggler" else ratio(one, bases[event])
        texts.append(f"{one.text} (×{share})" if share and system != BASE else one.text)
    return texts


def _redone(cells: Iterable[Cell]) -> str:
    counts = [n for c in cells for n in c.redone]
    if not counts:
        return "–"
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"


def phases(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """(header, lines): how tmrun splits its own pause, medians."""
    names = ("pause_s", "detect_s", "bind_s", "comm_s", "state_s", "redo_s")
    told: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("phases") and row["outcome"] == "recovered":
            one = row["trial"]
            tuning = "tuned" if one["tuned"] else "defaults"
            told[f"{TITLES[one['system']]} ({tuning})", EVENTS[one["event"]], setting_text(one)].append(row["phases"])
    lines = []
    for case, found in sorted(told.items()):
        values = [[f[n] for f in found if f.get(n) is not None] for n in names]
        lines.append([*case, *(f"{statistics.median(v):.3f}" if v else "–" for v in values)])
    return ["", "event", "setting", *(n.removesuffix("_s") for n in names)], lines


def growth(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """(header, lines): downtime over state size and over number of nodes."""
    lines = []
    for setting in settings(rows):
        here = select(rows, **setting)
        for event in dict.fromkeys(r["trial"]["event"] for r in here):
            cells = {s: cell(select(here, system=s, event=event, tuned=True)) for s in (BASE, "tmrun")}
            share = ratio(cells["tmrun"], cells[BASE])
            texts = [cells[BASE].text, cells["tmrun"].text, f"×{share}" if share else ""]
            lines.append([setting["state"], str(setting["nodes"]), EVENTS[event], *texts])
    return ["state", "nodes", "event", "torchrun", "tmrun", "ratio"], lines


def scale(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """(header, lines): a column a size."""
    newest = {row["hosts"]: row for row in rows}
    sizes = sorted(newest)
    lines = [[title, *(_figure(newest[n], name) for n in sizes)] for name, title in _SCALE.items()]
    return ["agents", *map(str, sizes)], lines


def _figure(row: Row, name: str) -> str:
    value = row["figures"].get(name) if row["outcome"] == "done" else None
    return row["outcome"] if row["outcome"] != "done" else "–" if value is None else f"{value:,}"


def exactness(rows: Sequence[Row]) -> dict[str, str]:
    """System -> whether its losses are bitwise those of torchrun's runs, which continue from exact checkpoints; "–": nothing to compare."""
    reference: dict[tuple[str, str], str] = {}
    for row in select(rows, system=BASE):
        if row["outcome"] == "recovered":
            reference |= {(_sizes(row), step): loss for step, loss in row["losses"].items()}
    verdicts = {}
    for system in SYSTEMS:
        good = [r for r in select(rows, system=system) if r["outcome"] == "recovered"]
        pairs = [(loss, reference[_sizes(r), step]) for r in good for step, loss in r["losses"].items() if (_sizes(r), step) in reference]
        verdicts[system] = "–" if not pairs else "yes" if all(a == b for a, b in pairs) else "no"
    return verdicts


def _sizes(row: Row) -> str:
    return f"{row['trial']['nodes']} {row['trial']['state']} {row['trial']['compiled']}"


def provenance(rows: Sequence[Row]) -> str:
    """Machine, dates, versions, load, in one sentence each."""
    machine = rows[-1]["machine"]
    dates = sorted(r["date"][:10] for r in rows)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    busy = [r["busy_before"] for r in rows if "busy_before" in r]
    repetitions = 1 + max(r["trial"]["rep"] for r in rows)
    versions = {k: v for r in rows for k, v in r.get("versions", {}).items()}
    where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']} GB"
    others = f"; before each, other work took {statistics.median(busy):.0%} of the cores (median; {max(busy):.0%} at most)" if busy else ""
    return (
        f"{where}, Linux {machine['kernel']}, Python {machine['python']}; {span}; "
        f"{', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}; up to {repetitions} repetitions, {_turns(rows)}{others}."
    )


def _turns(rows: Sequence[Row]) -> str:
    """Whether a slow hour of the machine met all systems alike, from the rows' own times."""
    dates = {s: [r["date"] for r in select(rows, system=s)] for s in SYSTEMS}
    dates = {s: found for s, found in dates.items() if found}
    apart = [s for s, mine in dates.items() if any(max(other) < min(mine) for other in dates.values())]
    if not apart:
        return "systems in turn"
    since = min(dates[apart[0]])[:16].replace("T", " ")
    return f"systems in turn, but {' and '.join(TITLES[s] for s in apart)} after the others, from {since} UTC on"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *("| " + " | ".join(line) + " |" for line in lines)])
