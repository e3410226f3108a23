"""What a launcher's live line says: a pure function of the job's status and of the nodes that run on this machine.

May not know: where it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tmrun.core.plural import many
from tmrun.tui import timeline
from tmrun.tui.styles import BAD, DIM, GOOD, JOB_STYLE, STYLE, TITLE, WARN, seconds, size
from tmrun.tui.views import standby_text

_BAR = 12


def line(status: Mapping[str, Any], own: Sequence[str], *, bars: bool = True) -> tuple[Text, str]:
    """(the line, its gist: what has to be told at once when it changes). ``bars``: progress is drawn, not only told."""
    head = Text.assemble((status["job"], TITLE), " ", (status["state"], JOB_STYLE.get(status["state"], BAD)))
    width = _BAR if bars else 0
    body = _waiting(status, width) or _migrating(status, width) or _training(status, width)
    tail = Text()
    if len(own) == 1:
        node = next((n for n in status["nodes"] if n["name"] == own[0]), None)
        if node is not None:
            tail = Text.assemble("  ", (f"{node['name']} {node['state']}", STYLE.get(node["state"], BAD)))
    gist = f"{status['state']} {standby_text(status['standby'])} {status['epoch']} {tail.plain}"
    return head.append("  ").append_text(body).append_text(tail), gist


def _waiting(status: Mapping[str, Any], width: int) -> Text | None:
    """Nobody trains yet, or any more, because nodes are missing."""
    if status["state"] not in ("rendezvous", "waiting_for_nodes") and not status["paused"]:
        return None
    line = Text(status["reason"] or "waiting")
    if status["state"] == "rendezvous" and status["nnodes"]:
        here, wanted = len(status["nodes"]), status["nnodes"] + status["standby"]["wanted"]
        return _bar(here, wanted, width, WARN).append(f"{here}/{many(wanted, 'node')}  ").append_text(line)
    return line


def _bar(done: int, total: int, width: int, style: str = GOOD) -> Text:
    return timeline.bar(done, total, width, style).append(" ") if width else Text()


def _migrating(status: Mapping[str, Any], width: int) -> Text | None:
    migration = status["migration"]
    if migration is None:
        return None
    now = next((p for p in migration["phases"] if p["state"] == "now"), migration["phases"][-1])
    moves = ", ".join(f"{m['leaver']} -> {m['joiner']}" for m in migration["moves"][:2])
    text = Text(f"epoch {migration['epoch']}: {moves or 'in place'}  {now['name']} ")
    text.append_text(_bar(now["done"], now["total"], width)).append(f"{now['done']}/{now['total']}")
    moving = migration.get("transfers") or ()
    done, total = sum(t["done"] for t in moving), sum(t["total"] for t in moving)
    detail = f"{size(done)} of {size(total)}" if moving and now["name"] == "state" else now["detail"]
    return text.append(f"  {detail}", DIM) if detail else text


def _training(status: Mapping[str, Any], width: int) -> Text:
    standby = status["standby"]
    text = Text()
    if status["step"] is not None:
        pace = f" ({seconds(status['step_s'])} a step)" if status["step_s"] else ""
        text.append(f"step {status['step']}{pace}  ")
    text.append(f"epoch {status['epoch']}  ")
    if standby["warming"]:
        text.append_text(_bar(standby["warm"], standby["warm"] + standby["warming"], width, WARN))
    return text.append(standby_text(status["standby"]), GOOD if standby["warm"] >= standby["wanted"] else WARN)


def migrated(row: Mapping[str, Any]) -> str:
    """A migration that is over, in the line that follows its commit."""
    return f"step {row['step']} ran; paused {row['pause_s']:.2f} s ({timeline.phases_text(row)})"


def ending(job: str, state: str, rows: Sequence[Mapping[str, Any]], steps: int | None, wall_s: float) -> list[str]:
    """What is told at the end: every migration, and what all of them cost."""
    moved = [r for r in rows if r["leaver"] or r["cause"] == "failure"]
    lines = [timeline.line(r) for r in moved]
    lost = sum(r["pause_s"] or 0.0 for r in moved)
    count = many(len(moved), "migration")
    cost = f"{count}, {lost:.2f} s paused in all" if moved else "no migration"
    reached = f", step {steps}" if steps is not None else ""
    return [*lines, f"job {job} {state} after {seconds(wall_s)}{reached}: {cost}"]
