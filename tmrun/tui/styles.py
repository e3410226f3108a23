"""Colours and letters of states: 256-colour tones of middle brightness, readable on dark and on light. Every state has a letter too, so
that nothing depends on colour. May not know: what is drawn with them.
"""

from __future__ import annotations

STYLE = {
    "active": "color(28)", "standby": "color(30)", "warming": "color(136)", "joining": "color(136)", "draining": "color(134)",
    "drained": "color(244)", "suspect": "bold color(166)", "failed": "bold reverse color(160)",
    "down": "bold reverse color(160)",
}  # fmt: skip
"""Node state -> style."""
LETTER = {
    "active": "=", "standby": "s", "warming": "w", "joining": "j", "draining": "D", "drained": "d", "suspect": "?",
    "failed": "F", "down": "X",
}  # fmt: skip
"""Node state -> the one letter of a dense grid. A cordoned node's letter is C."""
CORDONED = "C"
GOOD = "color(28)"
WARN = "bold color(136)"
BAD = "bold color(160)"
DIM = "color(244)"
TITLE = "bold"
SEVERITY = ("failed", "down", "suspect", "draining", "joining", "warming", "drained", "standby", "active")
"""Worst first."""
JOB_STYLE = {
    "running": GOOD, "succeeded": GOOD, "migrating": "color(134)", "recovering": WARN, "waiting_for_nodes": BAD, "failed": BAD,
    "paused": WARN, "rendezvous": WARN, "stopped": DIM,
}  # fmt: skip


def severity(state: str) -> int:
    """0 is worst; an unknown state is shown with the bad ones."""
    return SEVERITY.index(state) if state in SEVERITY else 0


def seconds(value: float | None) -> str:
    """A duration as people read it: ``85 ms``, ``0.92 s``, ``12 s``, ``3 min``, ``2.5 h``; ``-`` for None."""
    if value is None:
        return "-"
    for limit, scale, form in ((0.0995, 1e3, "{:.0f} ms"), (9.95, 1, "{:.2f} s"), (120, 1, "{:.0f} s"), (7200, 1 / 60, "{:.0f} min")):
        if value < limit:
            return form.format(value * scale)
    return f"{value / 3600:.1f} h"


def size(value: float | None) -> str:
    """Bytes as people read them: ``3.2 GB``."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def clip(text: str, width: int) -> str:
    """At most ``width`` characters, the last one ``…`` when something is missing."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
