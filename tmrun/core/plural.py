"""How people are told a number of things. May not know: where."""

from __future__ import annotations


def many(count: float, thing: str, things: str = "") -> str:
    """``many(1, "node")`` is ``1 node``, ``many(1024, "node")`` is ``1,024 nodes``; ``things``: where an s does not do."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:,g}"
    return f"{number} {thing if count == 1 else things or thing + 's'}"
