"""What the keys of ``top`` do: (where the user is, a key) -> (where the user is then, what is asked of the job). Pure.

May not know: terminals, the store, how it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

HELP = (
    ("arrows, j, k", "select a node; on the events page: scroll"),
    ("Enter", "everything about the selected node"),
    ("n", "select the next node that is not well"),
    ("d", "drain the selected node (asks)"),
    ("c", "cordon the selected node, or uncordon it (asks)"),
    ("p", "pause automatic replacement, or resume it (asks)"),
    ("e", "all events"),
    ("l", "the end of the selected node's log, as far as this machine has it"),
    ("?", "this help"),
    ("Esc", "back"),
    ("q", "quit; the job goes on"),
)


@dataclass(frozen=True, slots=True)
class Order:
    """What the user wants of the job: ``drain``, ``cordon``, ``uncordon``, ``pause`` or ``resume``; ``question`` is asked before."""

    verb: str
    node: str
    question: str


@dataclass(frozen=True, slots=True)
class Ui:
    """Where the user is."""

    selected: str = ""
    page: str = ""
    """Empty: the overview; or ``details``, ``events``, ``logs``, ``help``."""
    scroll: int = 0
    asking: Order | None = None
    said: str = ""
    """The outcome of the last order."""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """What keys may depend on: the nodes in the order they are drawn, those not well, cordoned ones, the number of columns of the grid."""

    nodes: Sequence[str]
    restless: Sequence[str] = ()
    cordoned: frozenset[str] = frozenset()
    paused: bool = False
    columns: int = 1
    events: int = 0


_PAGES = {"e": "events", "l": "logs", "?": "help", "enter": "details"}


def press(ui: Ui, key: str, shown: Shown) -> tuple[Ui, Order | None]:
    """One key; ``up``, ``down``, ``left``, ``right``, ``enter``, ``esc`` or a letter. The order is to be carried out."""
    if ui.asking is not None:
        return replace(ui, asking=None, said="" if key == "y" else "not done"), ui.asking if key == "y" else None
    ui = replace(ui, said="")
    if key in ("q", "ctrl-c"):
        return replace(ui, done=True), None
    if key == "esc":
        return replace(ui, page="", scroll=0), None
    if key in _PAGES:
        page = "" if ui.page == _PAGES[key] else _PAGES[key]
        return replace(_with_node(ui, shown), page=page, scroll=0), None
    if key in ("d", "c", "p"):
        return _ask(_with_node(ui, shown), key, shown), None
    return (_scroll(ui, key, shown) if ui.page == "events" else _move(ui, key, shown)), None


def _with_node(ui: Ui, shown: Shown) -> Ui:
    """Somebody who has selected nothing means the worst node, else the first."""
    if ui.selected in shown.nodes:
        return ui
    return replace(ui, selected=next(iter([*shown.restless, *shown.nodes]), ""))


def _ask(ui: Ui, key: str, shown: Shown) -> Ui:
    if key == "p":
        verb = "resume" if shown.paused else "pause"
        return replace(ui, asking=Order(verb, "", f"{verb} automatic replacement of the whole job?"))
    if not ui.selected:
        return replace(ui, said="there is no node yet")
    verb = "drain" if key == "d" else "uncordon" if ui.selected in shown.cordoned else "cordon"
    what = {"drain": "move its ranks to a warm standby", "cordon": "it is not chosen as a joiner", "uncordon": "it may be chosen again"}
    return replace(ui, asking=Order(verb, ui.selected, f"{verb} {ui.selected}: {what[verb]}?"))


def _move(ui: Ui, key: str, shown: Shown) -> Ui:
    if not shown.nodes:
        return ui
    if key == "n":
        return replace(ui, selected=_after(ui.selected, shown.restless) or ui.selected)
    step = {"left": -1, "right": 1, "up": -shown.columns, "k": -shown.columns, "down": shown.columns, "j": shown.columns}.get(key)
    if step is None:
        return ui
    if ui.selected not in shown.nodes:
        return _with_node(ui, shown)
    where = shown.nodes.index(ui.selected) + step
    return replace(ui, selected=shown.nodes[where]) if 0 <= where < len(shown.nodes) else ui


def _after(name: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]


def _scroll(ui: Ui, key: str, shown: Shown) -> Ui:
    step = {"up": 1, "k": 1, "down": -1, "j": -1, "left": 10, "right": -10}.get(key, 0)
    return replace(ui, scroll=min(max(0, ui.scroll + step), max(0, shown.events - 1)))
