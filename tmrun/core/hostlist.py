"""Node names in Slurm's short form: ``node[3-5,9],head`` <-> node3 node4 node5 node9 head, and its topology string.

Ranges keep their padding (``n[08-10]`` is n08 n09 n10); several brackets multiply (``r[1-2]n[1-2]``).
May not know: which nodes exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tmrun.core.errors import UsageError

MAX_NODES = 100_000
"""A typing error like ``node[0-99999999]`` must not fill the memory."""
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def expand(text: str) -> list[str]:
    """Hostlist -> names, in order, each once. Raises UsageError."""
    names: dict[str, None] = {}
    for part in _parts(text):
        for name in _expand_one(part, text):
            names[name] = None
            if len(names) > MAX_NODES:
                raise UsageError(f"hostlist {text!r} names more than {MAX_NODES} nodes")
    return list(names)


def _parts(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise UsageError(f"hostlist {text!r}: brackets do not match")
        if letter == "," and depth == 0:
            yield from [part] if part else []
            part = ""
        else:
            part += letter
    if depth:
        raise UsageError(f"hostlist {text!r}: brackets do not match")
    yield from [part] if part else []


def _expand_one(part: str, text: str) -> Iterator[str]:
    found = _BRACKETS.search(part)
    if found is None:
        yield part
        return
    before, after = part[: found.start()], part[found.end() :]
    for number in _numbers(found.group(1), text):
        for rest in _expand_one(after, text):
            yield before + number + rest


def _numbers(inside: str, text: str) -> Iterator[str]:
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"hostlist {text!r}: {item!r} is no number or range, write node[3-7,9]")
        if dash and int(last) < int(first):
            raise UsageError(f"hostlist {text!r}: the range {item} runs backwards")
        if dash and int(last) - int(first) >= MAX_NODES:
            raise UsageError(f"hostlist {text!r} names more than {MAX_NODES} nodes")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def compress(names: Iterable[str]) -> str:
    """Names -> the short form: ``node[3-5,9],head``. Only the last number of a name is folded."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    order: list[tuple[str, str, int] | str] = []
    for name in names:
        found = re.search(r"(\d+)(\D*)$", name)
        if found is None:
            order.append(name)
            continue
        digits = found.group(1)
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        key = (name[: found.start()], found.group(2), width)
        if key not in groups:
            groups[key] = []
            order.append(key)
        groups[key].append(int(digits))
    return ",".join(item if isinstance(item, str) else _folded(item, sorted(set(groups[item]))) for item in order)


def _folded(key: tuple[str, str, int], numbers: list[int]) -> str:
    before, after, width = key
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
    inside = ",".join(texts)
    return f"{before}{inside}{after}" if len(numbers) == 1 else f"{before}[{inside}]{after}"


def topology_labels(address: str, pattern: str) -> dict[str, str]:
    """``SLURM_TOPOLOGY_ADDR`` and ``..._PATTERN`` -> labels: (``s0.s5.node3``, ``switch.switch.node``) -> {switch: s5, switch2: s0}.

    The nearest switch is ``switch``, the one above it ``switch2`` and so on. Empty when there is none.
    """
    names, kinds = address.split("."), pattern.split(".")
    if len(names) != len(kinds):
        return {}
    levels = [name for name, kind in zip(names, kinds, strict=True) if kind in ("switch", "block")][::-1]
    return {f"switch{i + 1}" if i else "switch": name for i, name in enumerate(levels)}
