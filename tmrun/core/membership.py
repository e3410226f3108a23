"""Fold what the store holds into one immutable snapshot of the job; every decision reads exactly one.

``fold`` is a pure function of the key-value pairs, so duplicated or reordered watch events cannot change a decision.
May not know: how the pairs were read, time, what follows from them (see ``coordinator`` and ``node``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

from tmrun.core import admission, codec
from tmrun.core.keys import Keys
from tmrun.core.model import (
    Admin,
    Comm,
    Done,
    Doubt,
    End,
    Eviction,
    Fault,
    Head,
    Host,
    Kind,
    Leader,
    Leaving,
    Member,
    Migration,
    Notice,
    Obituary,
    Operation,
    OpState,
    Pause,
    Phase,
    RankMap,
    Run,
    Seat,
    Spec,
    Stall,
    Term,
    Trouble,
    Verb,
    Vote,
)
from tmrun.core.txn import KeyValue

T = TypeVar("T")

RECORDS: dict[str, type[Any]] = {
    "spec": Spec,
    "term": Term,
    "leader": Leader,
    "head": Head,
    "end": End,
    "pause": Pause,
    "notice": Notice,
    "member": Member,
    "obituary": Obituary,
    "admin": Admin,
    "map": RankMap,
    "comm": Comm,
    "migration": Migration,
    "vote": Vote,
    "run": Run,
    "trouble": Trouble,
    "done": Done,
    "doubt": Doubt,
    "leaving": Leaving,
    "stall": Stall,
    "eviction": Eviction,
    "op": Operation,
    "fault": Fault,
}


CACHED = 1 << 16
"""Records kept decoded. A job has about three a node (member, run, vote); with fewer than it has, every fold would decode them all."""


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """A record with what is needed to guard on it."""

    value: T
    key: str
    created: int
    modified: int


@dataclass(frozen=True)
class Job:
    """One snapshot of a job's protocol state.

    The coordinator's holds everything. Another one's holds of ``members``, ``obituaries``, ``answers``, ``doubts`` and ``leaving`` only its
    own, of ``runs``, ``troubles`` and ``done`` only the slots that concern it.
    """

    keys: Keys
    spec: Spec | None = None
    term: Stored[Term] | None = None
    leader: Stored[Leader] | None = None
    head: Stored[Head] | None = None
    end: End | None = None
    pause: Pause | None = None
    map: RankMap | None = None
    """The newest committed map."""
    maps: tuple[RankMap, ...] = ()
    """All committed maps, oldest first."""
    comm: Comm | None = None
    """Bootstrap ids that belong to ``map``."""
    migration: Stored[Migration] | None = None
    """The newest migration, decided or not."""
    aborted: tuple[Migration, ...] = ()
    """Vain attempts to change ``map``, oldest first."""
    members: Mapping[Host, Stored[Member]] = field(default_factory=dict)
    obituaries: Mapping[Host, Obituary] = field(default_factory=dict)
    admins: Mapping[Host, Admin] = field(default_factory=dict)
    notice: Notice | None = None
    """What the coordinator last told everybody."""
    answers: Mapping[Host, Stored[Vote]] = field(default_factory=dict)
    """The last vote of each node, on whichever migration."""
    votes: Mapping[Host, Stored[Vote]] = field(default_factory=dict)
    """Those of them that are on ``migration``."""
    runs: Mapping[int, Stored[Run]] = field(default_factory=dict)
    troubles: Mapping[int, Trouble] = field(default_factory=dict)
    done: Mapping[int, Done] = field(default_factory=dict)
    """Slots whose workers of this generation ended well."""
    doubts: Mapping[Host, Doubt] = field(default_factory=dict)
    leaving: Mapping[Host, Leaving] = field(default_factory=dict)
    stalls: Mapping[Host, Stall] = field(default_factory=dict)
    evictions: Mapping[Host, Eviction] = field(default_factory=dict)
    ops: Mapping[str, Operation] = field(default_factory=dict)
    faults: Mapping[Host, Fault] = field(default_factory=dict)
    machine_restarts: int = 0
    program_restarts: int = 0
    """How often the whole job was started anew: because machines were lost, because the program itself failed."""

    @property
    def restarts(self) -> int:
        """How often the whole job was started anew, for whatever reason."""
        return self.machine_restarts + self.program_restarts

    @property
    def epoch(self) -> int:
        """Number of the newest committed map, 0 before the first."""
        return self.map.epoch if self.map else 0

    @property
    def open_migration(self) -> Migration | None:
        """The undecided migration, if any."""
        if self.head is None or self.migration is None or self.head.value.open != self.migration.value.id:
            return None
        return self.migration.value

    def alive(self, seat: Seat) -> bool:
        """True while this very incarnation is registered."""
        member = self.members.get(seat.host)
        return member is not None and member.value.incarnation == seat.incarnation

    @cached_property
    def gone(self) -> tuple[int, ...]:
        """Slots whose seat is not ``alive``. Kept, because one decision asks several times and a job has thousands of seats."""
        here = self.members
        seats = self.map.seats if self.map else ()
        return tuple(i for i, s in enumerate(seats) if (m := here.get(s.host)) is None or m.value.incarnation != s.incarnation)

    def trouble(self, slot: int) -> Trouble | None:
        """The trouble of a slot, if it concerns the seat that holds it now."""
        trouble = self.troubles.get(slot)
        if trouble is None or self.map is None:
            return None
        current = self.map.seats[slot] == Seat(trouble.host, trouble.incarnation) and trouble.epoch >= self.map.generation
        return trouble if current else None

    def open_doubts(self) -> list[Doubt]:
        """Of the newest epoch."""
        return [d for d in self.doubts.values() if d.epoch == self.epoch]

    def doubt(self, seat: Seat) -> Doubt | None:
        """The open doubt of this seat's workers."""
        doubt = self.doubts.get(seat.host)
        return doubt if doubt is not None and (doubt.incarnation, doubt.epoch) == (seat.incarnation, self.epoch) else None

    def evicted(self, seat: Seat) -> Eviction | None:
        """The order to end what this seat runs in the newest epoch, if there is one."""
        order = self.evictions.get(seat.host)
        return order if order is not None and (order.incarnation, order.epoch) == (seat.incarnation, self.epoch) else None

    def draining(self, host: Host) -> bool:
        """True when the host must not hold ranks any more."""
        admin = self.admins.get(host)
        return admin is not None and admin.draining

    def cordoned(self, host: Host) -> bool:
        """True when the host must not be chosen as a joiner."""
        admin = self.admins.get(host)
        return admin is not None and (admin.draining or admin.cordoned)

    def replacement(self, host: Host) -> Operation | None:
        """The request under which this host gives its ranks up at once, without handing them over."""
        admin = self.admins.get(host)
        op = self.ops.get(admin.op) if admin is not None and admin.draining else None
        return op if op is not None and op.verb is Verb.REPLACE and op.state is OpState.OPEN else None

    def runs_on(self, host: Host) -> bool:
        """True while an agent of this host holds a slot's run key: its processes may still exist."""
        return any(r.value.host == host for r in self.runs.values())

    @property
    def movable(self) -> bool:
        """True once workers of this generation have reached ``run.steps``: a script that never does can only be restarted.

        Known to the coordinator; it tells the others (``told``).
        """
        return any(r.value.joined for r in self.runs.values())

    @property
    def told(self) -> Notice:
        """What the coordinator said of this generation; nothing, before it did."""
        generation = self.map.generation if self.map else 0
        return self.notice if self.notice is not None and self.notice.generation == generation else Notice(generation)

    def told_failed(self, slot: int) -> bool:
        """The coordinator said that the seat of the newest map is gone, or its workers."""
        return self.told.epoch == self.epoch and slot in self.told.failed

    def open_ops(self) -> list[Operation]:
        """Operators' requests that are not finished, oldest id first."""
        return [o for _, o in sorted(self.ops.items()) if o.state is OpState.OPEN]


def fold(keys: Keys, entries: Iterable[KeyValue]) -> Job:
    """Key-value pairs under ``keys.ctl``, all or those that an agent sees, -> snapshot. Raises CodecError for a record of a newer tmrun."""
    found: dict[str, dict[tuple[str, ...], Stored[Any]]] = {name: {} for name in RECORDS}
    for kv in entries:
        kind, rest = keys.parse(kv.key)
        if kind in RECORDS:
            found[kind][rest] = Stored(_decode(kind, kv.value), kv.key, kv.create_revision, kv.mod_revision)
    head = found["head"].get(())
    newest_map = found["map"].get((f"{head.value.epoch:08d}",)) if head else None
    comm = found["comm"].get((f"{head.value.epoch:08d}",)) if head else None
    migration = found["migration"].get((f"{head.value.last:08d}",)) if head else None
    end = found["end"].get(())
    spec = found["spec"].get(())
    pause = found["pause"].get(())
    notice = found["notice"].get(())
    generation = newest_map.value.generation if newest_map else 0
    return Job(
        keys=keys,
        spec=spec.value if spec else None,
        term=found["term"].get(()),
        leader=found["leader"].get(()),
        head=head,
        end=end.value if end else None,
        pause=pause.value if pause else None,
        map=newest_map.value if newest_map else None,
        maps=tuple(m.value for _, m in sorted(found["map"].items())),
        comm=comm.value if comm else None,
        migration=migration,
        aborted=_aborted([m.value for _, m in sorted(found["migration"].items())], newest_map.value if newest_map else None),
        members={Host(k[0]): v for k, v in found["member"].items()},
        obituaries={Host(k[0]): v.value for k, v in found["obituary"].items()},
        admins={Host(k[0]): v.value for k, v in found["admin"].items()},
        notice=notice.value if notice else None,
        answers={Host(k[0]): v for k, v in found["vote"].items()},
        votes={Host(k[0]): v for k, v in found["vote"].items() if migration and v.value.migration == migration.value.id},
        runs={int(k[0]): v for k, v in found["run"].items()},
        troubles={int(k[0]): v.value for k, v in found["trouble"].items()},
        leaving={Host(k[0]): v.value for k, v in found["leaving"].items()},
        doubts={Host(k[0]): v.value for k, v in found["doubt"].items()},
        stalls={Host(k[0]): v.value for k, v in found["stall"].items()},
        evictions={Host(k[0]): v.value for k, v in found["eviction"].items()},
        done={int(k[0]): v.value for k, v in found["done"].items() if v.value.epoch >= generation},
        ops={k[0]: v.value for k, v in found["op"].items()},
        faults={Host(k[0]): v.value for k, v in found["fault"].items()},
        machine_restarts=sum(m.value.kind is Kind.RESTART and not m.value.program for m in found["map"].values()),
        program_restarts=sum(m.value.program for m in found["map"].values()),
    )


def _aborted(migrations: Iterable[Migration], current: RankMap | None) -> tuple[Migration, ...]:
    return tuple(m for m in migrations if current is not None and m.base_epoch == current.epoch and m.phase is Phase.ABORTED)


@lru_cache(maxsize=CACHED)
def _decode(kind: str, text: str) -> Any:
    return codec.decode(RECORDS[kind], text)


def forget() -> None:
    """Drop the decoded records that ``fold`` keeps. Only a process that sees thousands of epochs of a large job needs to."""
    _decode.cache_clear()


@lru_cache(maxsize=CACHED)
def natural(host: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which node2 comes before node10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", host) if part)


def fitness(job: Job, member: Member) -> admission.Verdict:
    """Whether a member's machine is as good as those that train."""
    return admission.judge(member.machine, (r.value.machine for r in job.runs.values()))
