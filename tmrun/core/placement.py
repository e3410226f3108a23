"""Where nodes are, from their labels: which failure domains were lost, who is near whom, how spares are spread.

A *place* is a path of labels from coarse to fine (``block=b1/rack=r3``); each prefix of it is a failure domain. Labels that are no level
(``LEVELS``) say nothing about places. Without labels every place is empty and nothing here prefers anybody.
May not know: slots' moves, what members are for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from tmrun.core.errors import UsageError

LEVELS = ("zone", "block", "switch3", "switch2", "switch", "rack", "nvlink")
"""Coarse to fine."""


def place_of(labels: Mapping[str, str]) -> str:
    """{rack: r3, block: b1, gpu: h200} -> ``block=b1/rack=r3``."""
    return "/".join(f"{level}={labels[level]}" for level in LEVELS if level in labels)


@lru_cache(maxsize=1 << 14)
def domains(place: str) -> tuple[str, ...]:
    """All failure domains that a place is in, coarse to fine."""
    parts = place.split("/") if place else []
    return tuple("/".join(parts[: i + 1]) for i in range(len(parts)))


def lost(places: Sequence[str], slots: Collection[int]) -> frozenset[str]:
    """The domains that hold at least two slots, all of which have failed: what they share is to be suspected, not they."""
    failed = Counter(d for slot in slots if slot < len(places) for d in domains(places[slot]))
    if all(count < 2 for count in failed.values()):
        return frozenset()
    held = Counter(d for place in places for d in domains(place))
    return frozenset(d for d, count in failed.items() if count >= 2 and count == held[d])


def inside(place: str, lost_domains: Collection[str]) -> bool:
    """Whether a place is in one of these domains."""
    return any(d in lost_domains for d in domains(place))


def distance(one: str, other: str) -> int:
    """How many levels lie between two places: 0 in the same finest domain."""
    here, there = domains(one), domains(other)
    shared = sum(a == b for a, b in zip(here, there, strict=False))
    return max(len(here), len(there)) - shared


def near(one: str, other: str) -> str:
    """The finest level that two places share (``rack``); empty: none."""
    shared = [a for a, b in zip(domains(one), domains(other), strict=False) if a == b]
    return shared[-1].rpartition("/")[2].partition("=")[0] if shared else ""


def spares(places: Mapping[str, str], count: int) -> list[str]:
    """Which ``count`` of these hosts (host -> place, in the order in which slots are given) stay spare: over as many domains as possible,
    the largest first, and in each the last host."""
    left: dict[str, list[str]] = {}
    for host, place in places.items():
        left.setdefault(place, []).append(host)
    taken: Counter[str] = Counter()
    chosen: list[str] = []
    order = {host: i for i, host in enumerate(places)}
    while len(chosen) < min(count, len(places)):
        place = min((p for p in left if left[p]), key=lambda p: (taken[p], -len(left[p]), -order[left[p][-1]]))
        taken[place] += 1
        chosen.append(left[place].pop())
    return chosen


def parse_pattern(text: str) -> re.Pattern[str]:
    """A pattern for host names with named groups that are levels: ``r(?P<rack>\\d+)n\\d+``. Raises UsageError."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UsageError(f"--label-pattern {text!r}: {error}") from None
    unknown = [name for name in pattern.groupindex if name not in LEVELS]
    if unknown or not pattern.groupindex:
        named = f"{unknown[0]!r} is none of" if unknown else "name its groups after levels:"
        raise UsageError(f"--label-pattern {text!r}: {named} {', '.join(LEVELS)}; write e.g. 'r(?P<rack>[0-9]+)n[0-9]+'")
    return pattern


def labels_in(host: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """What the pattern finds in a host's name; nothing when it does not match."""
    found = pattern.search(host)
    return {name: value for name, value in found.groupdict().items() if value} if found else {}


def labels_from_file(text: str, host: str, where: str) -> dict[str, str]:
    """Lines ``HOST KEY=VALUE ...`` (``#`` comments) -> the labels of this host; nothing when it is not named. Raises UsageError."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words or words[0] != host:
            continue
        pairs = [word.partition("=") for word in words[1:]]
        bad = [key + sign + value for key, sign, value in pairs if not (key and sign and value)]
        if bad:
            raise UsageError(f"{where}:{number}: {bad[0]!r}: expected KEY=VALUE, e.g. rack=r1")
        return {key: value for key, _, value in pairs}
    return {}
