"""What a failure means and what is worth trying: asked by the coordinator, answers with a reason.

    cause_of    what ended a worker: the program, a crash, somebody's SIGKILL, no memory, a full disk, a hang; a lost node has none better
    judge       move the ranks, or give up: the same death of the same rank on several hosts, at the same step, follows the ranks, and a
                standby more would be wasted on it; so would the ninth failure in a row without a step of progress
    restart_delay   when an agent that was killed is started again: always, but ever later while its lives are short
    repeated    a rank that died of the same cause before an earlier restart of all: that follows the rank, whatever the machine
    strikes     how often a host was the one that failed lately: the least tried is chosen first, a *lemon* (the last failures were all
                its own) not at all until it has cooled down

Progress forgives: what is counted are failures since the job last got further. The memory is the job's maps, so it outlives every
coordinator; only the cool-down is a duration, on the coordinator's own clock. May not know: transactions, who asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, takewhile

from tmrun.core.model import Cause, Host, Incident, Kind, RankMap, Trouble

EXIT_LOST = 76
"""What a worker ends with that lost its agent, or the sender of the state it was to take over: a machine's failure, not the program's."""
EXIT_DISK = 74
"""EX_IOERR of sysexits.h: what a worker that has joined ends with when its host's disk is full or fails."""
_CRASHES = {4, 5, 6, 7, 8, 11}
"""SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: what a bug does as well as a bad machine."""
SAME = {Cause.MEMORY: 2, Cause.CRASH: 2, Cause.HANG: 2, Cause.DISK: 2}
"""So many earlier deaths of the same rank from this cause, without progress and on more than one host, prove that it follows the rank."""
MAX_FUTILE = 8
"""Failures in a row without a step of progress, whatever their causes."""
LEMON = 3
"""So many last failures of the job were all this host's: it does not get ranks again before it has cooled down."""
COOL_DOWN_S = 30.0
"""Doubles with each further one."""
MAX_COOL_DOWN_S = 3600.0
SHORT_LIFE_S = 60.0
MAX_RESTART_DELAY_S = 60.0
REMEMBERED = 16
"""Failures that are looked back on when hosts are compared."""


def cause_of(code: int, *, out_of_memory: bool = False, hung: bool = False, ours: bool = True) -> Cause:
    """``code`` as a shell shows it. ``ours``: from a worker that took part, not of a script that never heard of these codes."""
    if hung:
        return Cause.HANG
    if not ours and code in (EXIT_LOST, EXIT_DISK):
        return Cause.PROGRAM
    if code == 128 + 9 and out_of_memory:
        return Cause.MEMORY
    if code - 128 in _CRASHES:
        return Cause.CRASH
    if code == EXIT_DISK:
        return Cause.DISK
    return Cause.KILLED if code > 128 or code == EXIT_LOST else Cause.PROGRAM


class Action(str, Enum):
    """What to do about failed slots."""

    MOVE = "move"
    GIVE_UP = "give up"
    """It is the program: what its own errors get, a restart within the budget or the end."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``why`` is shown with whatever is done."""

    action: Action
    why: str


def judge(maps: Sequence[RankMap], troubles: Sequence[Trouble]) -> Verdict:
    """What to do now about these (a lost node has no trouble). ``maps`` of the job, oldest first."""
    futile = list(_futile(maps, max((t.step for t in troubles), default=-1)))
    for trouble in troubles:
        same = [i for m in futile for i in m.incidents if (i.rank, i.cause) == (trouble.rank, trouble.cause)]
        hosts = {i.host for i in same} | {trouble.host}
        if len(same) >= SAME.get(trouble.cause, len(same) + 1) and len(hosts) > 1:
            times = f"{len(same) + 1} times on {', '.join(sorted(hosts))}, always at step {futile[-1].resume.target}"
            return Verdict(Action.GIVE_UP, f"rank {trouble.rank} failed the same way {times}: it follows the rank ({trouble.text})")
    if len(futile) >= MAX_FUTILE:
        return Verdict(Action.GIVE_UP, f"{len(futile) + 1} failures in a row without a step of progress at step {futile[-1].resume.target}")
    return Verdict(Action.MOVE, "")


def _futile(maps: Sequence[RankMap], step: int) -> Iterator[RankMap]:
    """The last failures, newest first, after which the job got no further than one step; none if it failed now at a later ``step``."""
    at = step
    for current in reversed(maps):
        if current.kind is Kind.DRAIN:
            continue
        if current.kind is not Kind.FAILURE or not current.incidents or (at >= 0 and at > current.resume.target + 1):
            return
        at = current.resume.target
        yield current


def repeated(maps: Sequence[RankMap], rank: int, cause: Cause) -> bool:
    """Whether this rank has died of this cause before an earlier restart of all workers, however long they ran since: who is out of memory
    after 70 minutes will be again. A migration between them forgives: the job trained. A lost machine is never the program's."""
    row = takewhile(lambda m: m.kind is Kind.RESTART, reversed(maps))
    return rank >= 0 and cause is not Cause.LOST and any((i.rank, i.cause) == (rank, cause) for m in row for i in m.incidents)


def restart_delay(lives_s: Sequence[float]) -> float:
    """Seconds before an agent that was killed is started again. ``lives_s``: how long its lives on this host were, the last one last."""
    short = 0
    for life in reversed(lives_s):
        if life > SHORT_LIFE_S:
            break
        short += 1
    return float(min(MAX_RESTART_DELAY_S, 2 ** max(0, short - 1)))


def strikes(maps: Sequence[RankMap], host: Host) -> int:
    """Of the last failures, those of this host."""
    return sum(i.host == host for i in islice(_incidents(maps), REMEMBERED))


def lemons(maps: Sequence[RankMap]) -> dict[Host, float]:
    """Host -> seconds for which it gets no ranks, from its last failure on. At most one: only whoever failed last can be one."""
    last = next(_incidents(maps), None)
    row = 0 if last is None else sum(1 for _ in takewhile(lambda i: i.host == last.host, _incidents(maps)))
    return {last.host: min(MAX_COOL_DOWN_S, COOL_DOWN_S * 2 ** (row - LEMON))} if last is not None and row >= LEMON else {}


def _incidents(maps: Sequence[RankMap]) -> Iterator[Incident]:
    """Newest first."""
    return (i for m in reversed(maps) for i in m.incidents)
