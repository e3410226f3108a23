"""Whole screens as pure functions of JSON values (those of ``-o json``), width and height. May not know: stores, terminals, clocks."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tmrun.core import conditions, report
from tmrun.core.ranklist import ranks_named, ranks_text
from tmrun.tui import grid as grids
from tmrun.tui import timeline
from tmrun.tui.grid import QUIET, attention, grid, legend
from tmrun.tui.styles import BAD, DIM, GOOD, JOB_STYLE, STYLE, TITLE, WARN, clip, seconds, severity
from tmrun.tui.ui import HELP, Ui

Value = Mapping[str, Any]
PIPE = 10_000
"""Columns: more than any line has."""
_LAST = "REASON"
"""The column that gives way where it is narrow."""
TABLE_LIMIT = 40
"""Nodes that ``status`` still shows a line each."""


@dataclass(frozen=True, slots=True)
class Screen:
    """What ``top`` draws: the values of ``status``, ``history`` and ``events`` as JSON."""

    status: Value
    history: Sequence[Value] = ()
    events: Sequence[Value] = ()
    migrating_s: float | None = None
    """How long the reader has seen the migration that is going on."""
    logs: Sequence[str] = field(default=())
    """The end of the selected node's log."""


def show(renderable: RenderableType, console: Console | None = None) -> None:
    """Print to stdout; as wide as the terminal. In a pipe nothing is wrapped: a node, an epoch, a check is a line."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        console.print(renderable)
        return
    whole = Console(highlight=False, width=PIPE, file=io.StringIO(), no_color=True)
    with whole.capture() as captured:
        whole.print(renderable)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def stale(status: Value, silent_s: float, seen: str) -> Value:
    """What was last known, said to be so. ``seen``: what is known without the store."""
    lost = conditions.condition("STORE_LOST", f"no answer for {seconds(silent_s)}, all below is what was last known; {seen}")
    return {**status, "checks": [lost, *(c for c in status["checks"] if c["code"] != lost["code"])]}


_GRADE = {"bad": BAD, "warn": WARN}


# -- status
def headline(status: Value) -> Text:
    """Job, state and why."""
    line = Text.assemble((status["job"], TITLE), "  ", (status["state"], JOB_STYLE.get(status["state"], BAD)))
    return line.append(f" ({status['reason']})") if status["reason"] else line


def numbers(status: Value) -> Text:
    """Epoch, step and pace, standbys, coordinator, accelerators."""
    if status["state"] == report.UNKNOWN:
        return Text("all else is in the store", DIM)
    standby = status["standby"]
    step = "-" if status["step"] is None else str(status["step"])
    pace = f" ({seconds(status['step_s'])} a step)" if status["step_s"] else ""
    line = Text(f"epoch {status['epoch']}  step {step}{pace}  ")
    if status["paused"]:
        line.append("AUTOMATION PAUSED", BAD).append("  ")
    line.append(standby_text(standby), GOOD if standby["warm"] >= standby["wanted"] else WARN)
    line.append(f"  coordinator {status['coordinator'] or '-'}")
    if status["gpus"]["total"]:
        line.append(f"  GPUs {gpus_text(status['gpus'])} in use")
    return line


def standby_text(standby: Value) -> str:
    """``standby 1/2 warm``."""
    return f"standby {standby['warm']}/{standby['wanted']} warm" if standby["wanted"] or standby["warm"] else "no standby"


def health(status: Value) -> list[Text]:
    """A line a check; ``healthy`` when the job trains and there is none."""
    if status["checks"]:
        return [Text.assemble((c["code"], _GRADE[c["grade"]]), f": {c['text']}", (f"; {c['advice']}", DIM)) for c in status["checks"]]
    return [Text("healthy", GOOD)] if status["state"] == "running" else []


def status_view(status: Value, width: int = 100, *, wide: bool = False) -> RenderableType:
    """The one screen of ``tmrun status``."""
    parts: list[RenderableType] = [headline(status), numbers(status), *health(status)]
    for request in status["requests"]:
        left = f", by force after {seconds(request['force_after_s'])}" if request["force_after_s"] else ""
        parts.append(Text(f"open request {request['id']}: {request['verb']} {', '.join(request['nodes'])} ({request['reason']}){left}"))
    if status["migration"]:
        parts += [Text(), *timeline.going_on(status["migration"], width)]
    nodes = status["nodes"]
    if nodes and (wide or len(nodes) <= TABLE_LIMIT):
        parts += [Text(), nodes_table(nodes, wide=wide)]
    elif nodes:
        parts += [Text(), *attention(nodes, width, 20), legend(nodes, width), *grid(nodes, width, 40)]
    if status["last"] and status["last"]["leaver"]:
        parts += [Text(), Text("last: " + timeline.line(status["last"]))]
    return Group(*parts)


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style=TITLE)
    for name in columns:
        table.add_column(name, no_wrap=name != _LAST, justify="right" if name.endswith("_s") else "left")
    return table


def gpus_text(gpus: Value | None) -> str:
    """``in use/there``; ``-`` for a node that has none, or has not told."""
    return f"{gpus['used']}/{gpus['total']}" if gpus and gpus["total"] else "-"


def nodes_table(nodes: Sequence[Value], *, wide: bool = False) -> Table:
    """One line a node."""
    labels = any(n["labels"] for n in nodes)
    more = ("GPUS", *(("LABELS",) if labels else ()), *(("ADDRESS", "PIDS") if wide else ()))
    table = _plain_table("NODE", "STATE", "ROLE", "SLOT", "RANKS", "STEP", "AGE", *more, "REASON")
    for n in nodes:
        cordoned = n["cordoned"] and n["state"] not in ("draining", "drained")
        state = Text(n["state"], STYLE.get(n["state"], BAD)).append(",cordoned" if cordoned else "")
        cells: list[str | Text] = [n["name"], state, n["role"], "-" if n["slot"] is None else str(n["slot"]), ranks_text(n["ranks"]) or "-"]
        trains = n["step"] is not None and bool(n["ranks"])
        cells += [str(n["step"]), seconds(n["step_age_s"])] if trains else ["-", "-"]
        cells.append(gpus_text(n["gpus"]))
        cells += [",".join(f"{k}={v}" for k, v in sorted(n["labels"].items()))] if labels else []
        cells += [n["address"] or "-", ",".join(map(str, n["pids"])) or "-"] if wide else []
        table.add_row(*cells, "; ".join(x for x in (n["reason"], n["cordon_reason"] if cordoned else "") if x))
    return table


def history_view(rows: Sequence[Value], width: int) -> RenderableType:
    """One line an epoch; where that is too narrow for a table, as it is told elsewhere."""
    table = history_table(rows)
    if Console(width=PIPE, file=io.StringIO()).measure(table).minimum <= width:
        return table
    lines = []
    for r in rows:
        lines.append(Text.assemble(timeline.line(r), f" at step {r['step']}" if r["step"] else ""))
        lines += [Text(f"  {r['reason']}", DIM)] if r["reason"] else []
    return Group(*lines)


def history_table(rows: Sequence[Value]) -> Table:
    """One line an epoch."""
    phases = (*(f"{p}_s" for p in timeline.PHASES), "pause_s")
    table = _plain_table("EPOCH", "CAUSE", "LEAVER", "JOINER", "RANKS", "STEP", *phases, "REASON")
    for r in rows:
        times = ["-" if r[p] is None else f"{r[p]:.3f}" for p in phases]
        who = (r["leaver"] or "-", r["joiner"] or "-", ranks_text(r["ranks"]) or "all")
        table.add_row(str(r["epoch"]), r["cause"], *who, str(r["step"]), *times, r["reason"])
    return table


def event_line(event: Value) -> str:
    """``14:03:22 node7: text``; the writer's name only where the text does not begin with it."""
    stamp = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    who = "" if event["text"].split(" ")[0].rstrip(",:") == event["node"] else f"{event['node']}: "
    return f"{stamp} {who}{event['text']}"


def _near(move: Value) -> str:
    return f" (same {move['near']})" if move["near"] else ""


def foresight_view(plan: Value) -> RenderableType:
    """What ``plan`` prints."""
    lines = [
        Text(f"slot {m['slot']} ({ranks_named(m['ranks'])}) {m['leaver']} -> {m['joiner']}{_near(m)}; state from {m['source']}")
        for m in plan["moves"]
    ]
    lines += [Text(f"note: {n}", DIM) for n in plan["notes"]]
    pause = plan["pause_s"]
    told = f"{seconds(pause[0])} to {seconds(pause[1])}, as this job's drains so far" if pause else "unknown, this job has not drained yet"
    lines += [Text(f"expected pause: {told}")] if plan["moves"] else []
    return Group(*lines, *[Text(f"blocked: {b}", BAD) for b in plan["blockers"]])


# -- top
def top(screen: Screen, width: int, height: int, ui: Ui) -> Group:
    """The full screen, exactly ``height`` lines: what is wrong comes first and is never pushed out, events get what is left."""
    head = [headline(screen.status), numbers(screen.status)]
    checks = _checks(screen, width, height)
    room = height - _fixed(screen, width, height)
    body = {"events": _events, "help": _help, "logs": _logs, "details": _details}.get(ui.page, _overview)(screen, width, room, ui)
    lines = [*head, *checks, *body[:room]]
    lines += [Text()] * (height - 1 - len(lines))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Group(*lines, _footer(ui, width))


def _overview(screen: Screen, width: int, room: int, ui: Ui) -> list[Text]:
    nodes = screen.status["nodes"]
    lines, height = _above(screen, width, room)
    lines += [_rule("nodes", width), *grid(nodes, width, height, ui.selected), legend(nodes, width)]
    left = room - len(lines) - 1
    if left > 0:
        lines += [_rule("events", width), *_events(screen, width, left, ui)]
    return lines


def _above(screen: Screen, width: int, room: int) -> tuple[list[Text], int]:
    """What stands above the grid, and the height that is left for it."""
    nodes = screen.status["nodes"]
    troubled = sum(n["state"] not in QUIET for n in nodes)
    lines = attention(nodes, width, max(1, min(troubled, room // 4)))
    lines += _migration(screen, width, max(3, room // 2))
    left = room - len(lines)
    return lines, max(1, left - min(6, left // 3) - 2)


def columns(screen: Screen, width: int, height: int) -> int:
    """How many nodes the grid of this screen has in a line."""
    room = height - _fixed(screen, width, height)
    return grids.columns(screen.status["nodes"], width, _above(screen, width, room)[1])


def _fixed(screen: Screen, width: int, height: int) -> int:
    return 3 + len(_checks(screen, width, height))


def _checks(screen: Screen, width: int, height: int) -> list[Text]:
    """The worst first, wrapped once each as far as there is room: what to do comes last in a line."""
    lines: list[Text] = []
    for check in health(screen.status):
        lines += check.wrap(_WRAPS, width)[:2]
    return lines[: max(1, height // 6)]


_WRAPS = Console(file=io.StringIO())


def _migration(screen: Screen, width: int, room: int) -> list[Text]:
    if screen.status["migration"]:
        return [_rule("migration", width), *timeline.going_on(screen.status["migration"], width, screen.migrating_s)][:room]
    last = next((r for r in reversed(screen.history) if r["leaver"]), None)
    return [_rule("last migration", width), *timeline.where_it_went(last, width)][:room] if last else []


def _rule(title: str, width: int) -> Text:
    return Text(f"── {title} " + "─" * max(0, width - len(title) - 4), DIM)


def _events(screen: Screen, width: int, room: int, ui: Ui) -> list[Text]:
    end = len(screen.events) - (ui.scroll if ui.page == "events" else 0)
    shown = screen.events[max(0, end - room) : max(0, end)]
    return [Text(event_line(e)) for e in shown] or [Text("nothing has been told yet", DIM)]


def _help(screen: Screen, width: int, room: int, ui: Ui) -> list[Text]:
    return [_rule("keys", width), *(Text.assemble((f"{key:>12}  ", TITLE), what) for key, what in HELP)]


def _logs(screen: Screen, width: int, room: int, ui: Ui) -> list[Text]:
    lines = screen.logs or [f"this machine has no log of {ui.selected}: look on the node itself, and launch with --log-dir DIR (or -r 3)"]
    return [_rule(f"log of {ui.selected}", width), *(Text(clip(line, width)) for line in lines[1 - room :])]


def _details(screen: Screen, width: int, room: int, ui: Ui) -> list[Text]:
    node = next((n for n in screen.status["nodes"] if n["name"] == ui.selected), None)
    if node is None:
        return [Text(f"{ui.selected} is gone from the job", BAD)]
    lines = [_rule(node["name"], width)]
    shown = {
        "state": node["state"] + (", cordoned" if node["cordoned"] else ""),
        "reason": "; ".join(x for x in (node["reason"], node["cordon_reason"]) if x),
        "slot": None if node["slot"] is None else f"{node['slot']} ({ranks_named(node['ranks'])})",
        "pids": ", ".join(map(str, node["pids"])),
        "step": None if node["step"] is None else f"{node['step']}, {seconds(node['step_age_s'])} ago, {seconds(node['step_s'])} a step",
        "GPUs": f"{gpus_text(node['gpus'])} in use" if node["gpus"] and node["gpus"]["total"] else None,
        "address": node["address"],
        "labels": ", ".join(f"{k}={v}" for k, v in sorted(node["labels"].items())),
    }
    lines += [Text.assemble((f"{name:>9}  ", TITLE), str(value)) for name, value in shown.items() if value]
    mine = [r for r in screen.history if node["name"] in f"{r['leaver']},{r['joiner']}".split(",")]
    lines += [_rule("its migrations", width), *(Text(timeline.line(r)) for r in mine[-5:])] if mine else []
    told = [e for e in screen.events if e["node"] == node["name"] or node["name"] in e["text"].replace(",", " ").split()]
    left = room - len(lines) - 1
    lines += [_rule("its events", width), *(Text(event_line(e)) for e in told[-left:])] if told and left > 0 else []
    return lines


def _footer(ui: Ui, width: int) -> Text:
    if ui.asking:
        line = Text(f" {ui.asking.question} [y/n] ", "reverse bold")
    elif ui.said:
        line = Text(f" {ui.said} ", "reverse")
    else:
        line = Text(" ↑↓←→ select  Enter details  d drain  c cordon  e events  l logs  ? help  q quit", DIM)
    line.no_wrap = True
    line.truncate(width, overflow="ellipsis")
    return line


def plain_line(status: Value) -> str:
    """The state of the job in one line, for a terminal that cannot be drawn on."""
    bad = [n for n in status["nodes"] if severity(n["state"]) <= severity("draining")]
    urgent = [f"{c['code']}: {c['text']}" for c in status["checks"] if c["grade"] == "bad"]
    parts = [headline(status).plain, numbers(status).plain, *urgent, *(f"{n['name']} {n['state']}: {n['reason']}" for n in bad)]
    if status["migration"]:
        now = next((p for p in status["migration"]["phases"] if p["state"] == "now"), None)
        parts.append(f"migration {status['migration']['id']}" + (f" {now['name']} {now['done']}/{now['total']}" if now else ""))
    return "; ".join(parts)
