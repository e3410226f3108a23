"""How status and history look on a terminal. Pure: JSON values in, rich renderables out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_STATE_STYLE = {
    "active": "green", "standby": "cyan", "warming": "yellow", "joining": "yellow", "draining": "yellow",
    "drained": "dim", "failed": "bold red", "down": "bold red",
}  # fmt: skip


def show(renderable: RenderableType) -> None:
    """Print to stdout; as wide as the terminal, or as needed in a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(renderable)


def ranks_text(ranks: Sequence[int]) -> str:
    """[4, 5, 6, 9] -> ``4-6,9``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name.endswith("_s") else "left")
    return table


def status_view(value: Mapping[str, Any]) -> RenderableType:
    """The one screen of ``tmrun status``."""
    health = Text("healthy", style="green")
    if value["checks"]:
        health = Text("; ".join(f"{c['code']}: {c['text']}" for c in value["checks"]), style="yellow")
    head = Text.assemble((value["job"], "bold"), "  ", value["state"], f" ({value['reason']})" if value["reason"] else "", "  ", health)
    standby = value["standby"]
    step = "-" if value["step"] is None else str(value["step"])
    pace = f" ({value['step_s'] * 1000:.0f} ms a step)" if value["step_s"] else ""
    spares = f"standby {standby['warm']}/{standby['wanted']} warm"
    line = f"epoch {value['epoch']}  step {step}{pace}  {spares}  coordinator {value['coordinator'] or '-'}"
    parts: list[RenderableType] = [head, Text(line), Text(), nodes_table(value["nodes"])]
    if value["last"] and value["last"]["leaver"]:
        parts += [Text(), Text("last: " + migration_line(value["last"]))]
    return Group(*parts)


def nodes_table(nodes: Sequence[Mapping[str, Any]]) -> Table:
    """One line a node."""
    table = _plain_table("NODE", "STATE", "ROLE", "SLOT", "RANKS", "PIDS", "REASON")
    for n in nodes:
        state = Text(n["state"], style=_STATE_STYLE.get(n["state"], ""))
        slot = "-" if n["slot"] is None else str(n["slot"])
        pids = ",".join(map(str, n["pids"])) or "-"
        table.add_row(n["name"], state, n["role"], slot, ranks_text(n["ranks"]) or "-", pids, n["reason"])
    return table


def migration_line(row: Mapping[str, Any]) -> str:
    """A migration in one line."""
    text = f"epoch {row['epoch']} {row['cause']} {row['leaver']} -> {row['joiner']} (ranks {ranks_text(row['ranks'])})"
    if row["pause_s"] is None:
        return text
    return f"{text}, paused {row['pause_s']:.2f} s ({phases_text(row)})"


def phases_text(row: Mapping[str, Any]) -> str:
    """``detect 0.01, bind 0.30, ...``."""
    return ", ".join(f"{name} {row[f'{name}_s']:.2f}" for name in ("detect", "bind", "comm", "state", "redo"))


def history_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line an epoch."""
    phases = ("detect_s", "bind_s", "comm_s", "state_s", "redo_s", "pause_s")
    table = _plain_table("EPOCH", "CAUSE", "LEAVER", "JOINER", "RANKS", "STEP", *phases, "REASON")
    for r in rows:
        times = ["-" if r[p] is None else f"{r[p]:.3f}" for p in phases]
        table.add_row(
            str(r["epoch"]),
            r["cause"],
            r["leaver"] or "-",
            r["joiner"] or "-",
            ranks_text(r["ranks"]) or "all",
            str(r["step"]),
            *times,
            r["reason"],
        )
    return table
