"""How people are told of many things: how many, and some of them by name. May not know: where."""

from __future__ import annotations

from collections.abc import Sequence


def many(count: float, thing: str, things: str = "") -> str:
    """``many(1, "node")`` is ``1 node``, ``many(1024, "node")`` is ``1,024 nodes``; ``things``: where an s does not do."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:,g}"
    return f"{number} {thing if count == 1 else things or thing + 's'}"


MAX_NAMED = 8
"""A list that people are told may have thousands of names."""


def some(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
