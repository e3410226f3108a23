"""Which of a worker's output streams goes where: torchrun's ``--redirects`` and ``--tee`` as values, and the prefix of a console line.

May not know: files, processes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from string import Template

from tmrun.core.errors import UsageError

_MAPPING = re.compile(r"\d+:[0-3](,\d+:[0-3])*")
OUT, ERR = 1, 2


@dataclass(frozen=True, slots=True)
class Streams:
    """A set of streams (1 stdout, 2 stderr, 3 both) for every local rank, or for those named."""

    everywhere: int = 0
    by_rank: dict[int, int] = field(default_factory=dict)

    def has(self, local_rank: int, stream: int) -> bool:
        """Whether the stream of this rank is in the set."""
        return bool((self.by_rank.get(local_rank, 0) | self.everywhere) & stream)

    @property
    def any(self) -> bool:
        """Whether there is one at all."""
        return bool(self.everywhere or any(self.by_rank.values()))


@dataclass(frozen=True, slots=True)
class Output:
    """Where the output of a node's workers goes.

    ``log_dir``: folder of the logs; empty: none wished, ``/dev/null``: no files whatsoever. ``only``: local ranks that the console shows,
    empty: all. ``prefix``: template of a tee'd line's prefix. ``copies_out``, ``copies_err``: tee'd lines that hold one of these texts are
    also written to a file of their own.
    """

    log_dir: str = ""
    redirects: Streams = Streams()
    tee: Streams = Streams()
    only: tuple[int, ...] = ()
    copies_out: tuple[str, ...] = ()
    copies_err: tuple[str, ...] = ()
    prefix: str = ""

    def shows(self, local_rank: int) -> bool:
        """Whether the console shows this rank."""
        return not self.only or local_rank in self.only


def parse_streams(text: str, flag: str) -> Streams:
    """``3`` or ``0:3,1:2`` (local rank: streams). Raises UsageError."""
    if re.fullmatch("[0-3]", text):
        return Streams(int(text))
    if not _MAPPING.fullmatch(text):
        raise UsageError(f"{flag} {text!r}: expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:STREAMS, e.g. 0:3,1:2")
    return Streams(by_rank={int(rank): int(streams) for rank, streams in (part.split(":") for part in text.split(","))})


def prefix(template: str, role: str, local_rank: int, rank: int, node: str) -> str:
    """What stands before a tee'd line; torchrun's fields, and ``${node}``. ``${time}`` is left for the line itself."""
    if not template:
        return f"[{role}{local_rank}]:"
    return Template(template).safe_substitute(role_name=role, local_rank=local_rank, rank=rank, node=node)
