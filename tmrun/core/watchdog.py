"""Is a worker stuck, and who of all that wait is the one they wait for? Judged from outside, from readings that a worker leaves in memory.

    observe    one reading more of one worker: when it last moved, how long its steps take
    evidence   why it counts as stuck now, if it does: *stopped* (a signal froze it), *mute* (none of its Python threads runs: something
               holds the GIL), *late* (no progress for longer than its own history allows); or *left*: its loop is over
    culprits   of the signs of all ranks: who did not come to where the others wait

The victims of a hang look as stuck as its cause: a rank that is stopped or mute is a cause by itself, one that is late only if it is
*behind* the others. Deadlines are learned (a multiple of the longest recent step; the first steps after a start or a switch count for
nothing) on top of a floor for each kind of evidence: the weaker the evidence, the longer.
May not know: how readings are taken, stores, clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

from tmrun.core.errors import UsageError
from tmrun.core.model import Evidence, Sign

WARM_UP_STEPS = 3
"""Steps after a start or a switch whose length teaches nothing: they compile, allocate and connect."""
REMEMBERED_STEPS = 64
BLIND_S = 1.0
"""A watcher that did not look for longer cannot say what happened meanwhile: the time is not counted."""


class Place(IntEnum):
    """Where a worker's main thread is. ``BETWEEN``: in the script, outside of a step; ``PARKED``: waits for a decision, as it should."""

    BOOT = 0
    STEP = 1
    VOTE = 2
    BETWEEN = 3
    PARKED = 4
    DONE = 5


@dataclass(frozen=True, slots=True)
class Reading:
    """What is seen of a worker at one moment.

    ``operations``: collectives of the whole world that it entered in this step. ``ticks``: counts up while any Python thread gets to
    run. ``stopped``: the kernel says that a signal or a tracer stopped the process. ``compiling``: torch.compile is at work.
    """

    place: Place
    epoch: int
    step: int
    operations: int
    ticks: int
    stopped: bool = False
    compiling: bool = False

    @property
    def position(self) -> tuple[int, int, int, Place, bool]:
        """Changes when the worker makes progress."""
        return self.epoch, self.step, self.operations, self.place, self.compiling


@dataclass(frozen=True, slots=True)
class Watch:
    """What a watcher remembers of one worker; times in seconds of its own clock."""

    last: Reading
    looked: float
    moved: float
    ticked: float
    running: float
    """When it was last seen not stopped."""
    began: float
    """When its step began."""
    durations: tuple[float, ...] = ()
    settled: int = 0
    """Steps done since the start or the last switch."""

    @property
    def longest(self) -> float:
        """Of the last steps, 0 if unknown."""
        return max(self.durations, default=0.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """A floor in seconds for each kind of evidence, and how often the longest recent step is added to it."""

    stopped_s: float = 1.0
    mute_s: float = 60.0
    late_s: float = 60.0
    between_s: float = 1800.0
    """Outside of a step people save checkpoints and evaluate."""
    compiling_s: float = 1800.0
    """A compiler takes as long as it takes, in any step."""
    left_s: float = 2.0
    """Most scripts end right after their loop, and are not told of."""
    act: float = 5.0
    """Who is late is told after ``late_s``, and ended after so many times as long: a step may do something rare."""
    steps: float = 5.0
    unsettled: float = 4.0
    """Multiplies the floors while nothing is learned yet."""


def limits(text: str) -> Limits | None:
    """``auto``, ``off`` (None), or seconds that a step may take longer than it ever did. Raises UsageError."""
    if text in ("auto", "off"):
        return Limits() if text == "auto" else None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise UsageError(f"--hang-timeout {text!r}: expected auto, off or a number of seconds above 0")
    usual = Limits()
    return Limits(min(usual.stopped_s, seconds), min(usual.mute_s, seconds), seconds, 10 * seconds, act=1.0, steps=1.0)


def observe(watch: Watch | None, reading: Reading, now: float) -> Watch:
    """Fold one reading."""
    if watch is None:
        return Watch(reading, now, now, now, now, now)
    if now - watch.looked > BLIND_S:
        watch = _shift(watch, now - watch.looked)
    if reading.epoch != watch.last.epoch:
        watch = replace(watch, settled=0)
    if reading.step != watch.last.step:
        watch = _step(watch, now)
    return replace(
        watch,
        last=reading,
        looked=now,
        moved=now if reading.position != watch.last.position else watch.moved,
        ticked=now if reading.ticks != watch.last.ticks else watch.ticked,
        running=watch.running if reading.stopped else now,
    )


def _shift(watch: Watch, seconds: float) -> Watch:
    return replace(
        watch,
        moved=watch.moved + seconds,
        ticked=watch.ticked + seconds,
        running=watch.running + seconds,
        began=watch.began + seconds,
    )


def _step(watch: Watch, now: float) -> Watch:
    learned = watch.settled >= WARM_UP_STEPS
    durations = (*watch.durations, now - watch.began)[-REMEMBERED_STEPS:] if learned else watch.durations
    return replace(watch, began=now, durations=durations, settled=watch.settled + 1)


def evidence(watch: Watch, limit: Limits, now: float) -> tuple[Evidence, float] | None:
    """(what speaks against this worker, for how many seconds); None: nothing."""
    place = watch.last.place
    if now - watch.running > limit.stopped_s:
        return Evidence.STOPPED, now - watch.running
    if place is Place.DONE:
        return (Evidence.LEFT, 0.0) if now - watch.moved > limit.left_s else None
    if place is Place.BOOT:
        return None
    patience = 1.0 if watch.settled >= WARM_UP_STEPS else limit.unsettled
    learned = limit.steps * watch.longest
    if now - watch.ticked > limit.mute_s * patience + learned:
        return Evidence.MUTE, now - watch.ticked
    floor = patience * (limit.between_s if place is Place.BETWEEN else limit.late_s)
    if watch.last.compiling:
        floor = max(floor, limit.compiling_s)
    if place is not Place.PARKED and now - watch.moved > floor + learned:
        return Evidence.LATE, now - watch.moved
    return None


class Blame(str, Enum):
    """What the signs of a hang say."""

    RANKS = "ranks"
    """Some ranks keep the others waiting."""
    NOBODY = "nobody"
    """All ranks wait at the same place: a connection is dead, or the program waits for something outside."""
    PROGRAM = "program"
    """Some ranks have left the loop, and others wait for them in a later step: no process can be replaced to heal that."""
    UNCLEAR = "unclear"
    """Too many would be to blame: look, do not touch."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Who is to blame, and why, for people."""

    blame: Blame
    ranks: tuple[int, ...] = ()
    why: str = ""
    at_once: bool = False
    """Whoever is late gets no more time: nothing that others do can explain it."""


def keep_parked_waiting(signs: Sequence[Sign], parked: Collection[int], needed: Collection[int]) -> Finding | None:
    """Who does not stop, when all others of those who are ``needed`` have stopped for a migration; None: nobody, or not all have yet.

    Its connections are cut, so it waits for nobody: it loops, or computes longer than it ever did.
    """
    late = [s for s in signs if s.evidence is Evidence.LATE and s.rank not in parked]
    here = {s.rank for s in signs if s.place == Place.PARKED.name} | set(parked) | {s.rank for s in late}
    if not late or not here.issuperset(needed):
        return None
    why = "; ".join(f"{_text(s)}, all others have stopped for the migration" for s in late)
    return replace(_blamed(late, max(2 * len(late), len(needed)), why), at_once=True)


def culprits(signs: Sequence[Sign], world: int) -> Finding:
    """Who keeps the others waiting. ``signs`` of all ranks that are known; never blames more than half of the world (but one always)."""
    strong = [s for s in signs if s.evidence in (Evidence.STOPPED, Evidence.MUTE)]
    if strong:
        return _blamed(strong, world, "; ".join(_text(s) for s in strong))
    waiting = [s for s in signs if s.evidence is Evidence.LATE]
    if not waiting:
        return Finding(Blame.UNCLEAR, why="every rank makes progress")
    over = [s for s in signs if s.evidence is Evidence.LEFT]
    if over:
        return _left(over, max(waiting, key=_position))
    if len(signs) < world:
        return Finding(Blame.UNCLEAR, why=f"known ranks: only {len(signs)} of {world}")
    behind = [s for s in signs if _position(s) == min(map(_position, signs))]
    if len(behind) == len(signs):
        return Finding(Blame.NOBODY, why=f"all {world} ranks wait {_where(signs[0])}")
    patient = [s for s in behind if s.evidence is Evidence.NONE]
    if patient:
        return Finding(Blame.UNCLEAR, why=f"waiting for {_text(patient[0]).replace(' is ', ' ', 1)}, which may take longer")
    ahead = max(signs, key=_position)
    return _blamed(behind, world, "; ".join(f"{_text(s)}, {_lacking(s, ahead)}" for s in behind))


def _left(over: Sequence[Sign], ahead: Sign) -> Finding:
    """Whoever left the loop after the last step that others are in has done its part."""
    early = [s for s in over if s.step < ahead.step]
    if not early:
        return Finding(Blame.UNCLEAR, why=f"{_text(ahead)}, nobody waits for it in a step")
    why = "; ".join(f"{_text(s)}, while rank {ahead.rank} waits in step {ahead.step}" for s in early)
    return Finding(Blame.PROGRAM, tuple(s.rank for s in early), why)


def _blamed(signs: Sequence[Sign], world: int, why: str) -> Finding:
    if len(signs) > max(1, world // 2):
        return Finding(Blame.UNCLEAR, tuple(s.rank for s in signs), f"stuck ranks: {len(signs)} of {world}: {why}")
    return Finding(Blame.RANKS, tuple(s.rank for s in signs), why)


def _position(sign: Sign) -> tuple[int, int, bool]:
    return sign.step, sign.operations, sign.place == Place.VOTE.name


def _where(sign: Sign) -> str:
    if sign.place == Place.BETWEEN.name:
        return f"between two steps, after step {sign.step}"
    return f"in {'the vote of ' if sign.place == Place.VOTE.name else ''}step {sign.step}"


def _lacking(sign: Sign, ahead: Sign) -> str:
    if sign.step != ahead.step:
        return f"others are in step {ahead.step}"
    if sign.operations != ahead.operations:
        return f"entered {sign.operations} of its collectives, others {ahead.operations}"
    return "others wait in its vote"


def _text(sign: Sign) -> str:
    at = f" at {sign.where}" if sign.where else ""
    what = {
        Evidence.STOPPED: f"is stopped by a signal (frozen) since {sign.since_s:.1f} s",
        Evidence.MUTE: f"runs none of its Python threads since {sign.since_s:.1f} s (something holds the GIL){at}",
        Evidence.LATE: f"has made no progress for {sign.since_s:.1f} s {_where(sign)}{at}",
        Evidence.LEFT: f"left the loop after step {sign.step}{at}",
        Evidence.NONE: f"is {_where(sign)}{at}",
    }
    return f"rank {sign.rank} {what[sign.evidence]}"
