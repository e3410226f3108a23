"""How people are shown ranks. May not know: where."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def ranks_text(ranks: Iterable[int]) -> str:
    """[4, 5, 6, 9] -> ``4-6,9``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def ranks_named(ranks: Collection[int]) -> str:
    """[4] -> ``rank 4``, [4, 5, 6] -> ``ranks 4-6``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranks_text(ranks)}"
