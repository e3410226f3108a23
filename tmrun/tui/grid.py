"""All nodes of a job on a part of a screen, whatever their number: the roomiest of four forms that fits, and bad nodes always by name.

    cards   name, state, ranks and step      a few nodes
    cells   name and state                   some dozens
    dots    a letter a node                  hundreds
    counts  a letter and a number a block    thousands on a small screen

May not know: where the rows come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tmrun.core.hostlist import compress
from tmrun.core.ranklist import ranks_named
from tmrun.tui.styles import BAD, CORDONED, DIM, LETTER, STYLE, clip, severity

Node = Mapping[str, Any]
_CARD = 38
_GAP = 2
_REASONS = 2
"""When bad nodes are folded into hostlists: so many still say why."""
QUIET = ("active", "standby")
"""States that need no attention."""


def grid(nodes: Sequence[Node], width: int, height: int, selected: str = "") -> list[Text]:
    """At most ``height`` lines of at most ``width`` columns. Empty when there is no room."""
    if height < 1 or not nodes:
        return []
    for form in (_cards, _cells, _dots):
        lines = form(nodes, width, selected)
        if len(lines) <= height:
            return lines
    return _counts(nodes, width, height)


def columns(nodes: Sequence[Node], width: int, height: int) -> int:
    """How many nodes there are in a line of ``grid``: what the up and down keys skip."""
    name = min(12, max((len(n["name"]) for n in nodes), default=1))
    label = min(16, max((len(n["name"]) for n in nodes), default=1))
    for count in (max(1, width // (_CARD + _GAP)), max(1, (width + _GAP) // (name + 2 + _GAP)), _per_line(width, label)):
        if -(-len(nodes) // count) <= height:
            return count
    return -(-len(nodes) // max(1, height))


def letter(node: Node) -> str:
    """The node in one letter."""
    quiet = node["state"] in QUIET or node["state"] == "warming"
    return CORDONED if node.get("cordoned") and quiet else LETTER.get(node["state"], "?")


def _style(node: Node, selected: str) -> str:
    style = STYLE.get(node["state"], BAD)
    return f"{style} reverse underline" if node["name"] == selected else style


def _cards(nodes: Sequence[Node], width: int, selected: str) -> list[Text]:
    columns = max(1, width // (_CARD + _GAP))
    card = min(_CARD, width)
    name = min(14, max(len(n["name"]) for n in nodes))
    return _tiles([_card(n, name, card, selected) for n in nodes], columns, card)


def _card(node: Node, name: int, width: int, selected: str) -> Text:
    what = ranks_named(node["ranks"]) if node["ranks"] else ""
    step = "" if node.get("step") is None or not node["ranks"] else f"step {node['step']}"
    state = node["state"] + (" (cordoned)" if letter(node) == CORDONED else "")
    text = Text().append(_end(node["name"], name).ljust(name), "bold reverse" if node["name"] == selected else "bold")
    return text.append(" " + clip(" ".join(x for x in (state, what, step) if x), width - name - 1), STYLE.get(node["state"], BAD))


def _cells(nodes: Sequence[Node], width: int, selected: str) -> list[Text]:
    name = min(12, max(len(n["name"]) for n in nodes))
    cell = name + 2
    tiles = [Text(f"{_end(n['name'], name)} {letter(n)}".rjust(cell), style=_style(n, selected)) for n in nodes]
    return _tiles(tiles, max(1, (width + _GAP) // (cell + _GAP)), cell)


def _end(name: str, width: int) -> str:
    """The end of a name tells nodes apart."""
    return name if len(name) <= width else "…" + name[1 - width :]


def _tiles(tiles: Sequence[Text], columns: int, width: int) -> list[Text]:
    lines = []
    for start in range(0, len(tiles), columns):
        line = Text(no_wrap=True)
        for i, tile in enumerate(tiles[start : start + columns]):
            line.append_text(tile)
            if i < columns - 1:
                line.append(" " * (width - tile.cell_len + _GAP))
        lines.append(line)
    return lines


def _per_line(width: int, label: int) -> int:
    """Dots a line: a number that people can count with, in groups of ten."""
    room = width - label - 1
    return next((n for n in (100, 50, 40, 20, 10) if n + n // 10 <= room), 10)


def _dots(nodes: Sequence[Node], width: int, selected: str) -> list[Text]:
    label = min(16, max(len(n["name"]) for n in nodes))
    per_line = _per_line(width, label)
    lines = []
    for start in range(0, len(nodes), per_line):
        row = nodes[start : start + per_line]
        line = Text(no_wrap=True).append(_end(row[0]["name"], label).ljust(label) + " ", DIM)
        for i, node in enumerate(row):
            line.append((" " if i and i % 10 == 0 else "") + letter(node), _style(node, selected))
        lines.append(line)
    return lines


def _counts(nodes: Sequence[Node], width: int, height: int) -> list[Text]:
    """Blocks of neighbours, the same number in each line."""
    block = -(-len(nodes) // height)
    lines = []
    for start in range(0, len(nodes), block):
        row = nodes[start : start + block]
        counts = Counter(letter(n) for n in row)
        worst = sorted(row, key=lambda n: severity(n["state"]))
        line = Text(no_wrap=True).append(clip(f"{row[0]['name']} .. {row[-1]['name']}", 30).ljust(31), DIM)
        for node in {letter(n): n for n in reversed(worst)}.values():
            line.append(f"{letter(node)}{counts[letter(node)]} ", STYLE.get(node["state"], BAD))
        line.truncate(width)
        lines.append(line)
    return lines


def legend(nodes: Sequence[Node], width: int) -> Text:
    """What the letters mean, with how many of each there are; the worst first."""
    counts = Counter((n["state"], letter(n)) for n in nodes)
    line = Text(no_wrap=True, overflow="ellipsis")
    for (state, sign), count in sorted(counts.items(), key=lambda item: (severity(item[0][0]), item[0][1])):
        line.append(f"{sign} {state}{' cordoned' if sign == CORDONED else ''} {count}", STYLE.get(state, BAD)).append("  ")
    line.truncate(width)
    return line


def attention(nodes: Sequence[Node], width: int, height: int) -> list[Text]:
    """Every node that is not well, worst first, with why; when there is no room for a line each, the rest by state as hostlists."""
    restless = sorted((n for n in nodes if n["state"] not in QUIET), key=lambda n: severity(n["state"]))
    restless = [n for n in restless if severity(n["state"]) <= severity("draining")] or restless[:height]
    if not restless or height < 1:
        return []
    if len(restless) <= height:
        return [_why(n, width) for n in restless]
    states: dict[str, list[Node]] = {}
    for node in restless:
        states.setdefault(node["state"], []).append(node)
    lines = [_folded(state, found, width) for state, found in states.items()][:height]
    return lines + [_why(n, width) for n in restless[: min(_REASONS, height - len(lines))]]


def _why(node: Node, width: int) -> Text:
    what = f"{node['name']} {node['state']}"
    slot = f" (slot {node['slot']}, {ranks_named(node['ranks'])})" if node["ranks"] else ""
    line = Text(no_wrap=True).append(f" {letter(node)} ", STYLE.get(node["state"], BAD))
    line.append(" " + what, "bold").append(f"{slot}{': ' + node['reason'] if node['reason'] else ''}")
    line.truncate(width, overflow="ellipsis")
    return line


def _folded(state: str, nodes: Sequence[Node], width: int) -> Text:
    line = Text(no_wrap=True).append(f" {letter(nodes[0])} ", STYLE.get(state, BAD))
    line.append(f" {len(nodes)} {state}: ", "bold").append(compress([n["name"] for n in nodes]))
    line.truncate(width, overflow="ellipsis")
    return line
