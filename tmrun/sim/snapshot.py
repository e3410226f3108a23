"""The coordinator's snapshot of a job, kept from event to event: what changed is folded, the rest is there already.

A job has thousands of registrations and claims, and one fault changes a few. The result is that of one ``membership.fold`` over
everything; the tests compare. May not know: who writes, what is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tmrun.core.keys import Keys
from tmrun.core.membership import Job, Stored, fold
from tmrun.core.model import Host, Member, Run, Vote
from tmrun.core.txn import KeyValue
from tmrun.store.api import Changed, Resync, WatchEvent


class Snapshot:
    """Fed by a watch on ``keys.ctl``."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._votes: Mapping[Host, Stored[Vote]] = {}
        self._voted = 0
        self._changed: dict[str, KeyValue | None] = {}
        self._members: dict[Host, Stored[Member]] = {}
        self._runs: dict[int, Stored[Run]] = {}
        self._of_key: dict[str, tuple[Host | None, int | None]] = {}
        self._rest: dict[str, KeyValue] = {}
        self._folded: Job | None = None
        """``_rest`` folded, as long as none of it changes."""
        self._job: Job | None = None

    def hear(self, event: WatchEvent) -> None:
        """Of the watch."""
        changes = [Changed(e.key, e, e.mod_revision) for e in event.listing.entries] if isinstance(event, Resync) else [event]
        self._job = None
        self._changed.update({c.key: c.value for c in changes})

    def crowd(self, votes: Mapping[Host, Stored[Vote]], migration: int) -> None:
        """What the stayers say of this migration, without passing through the store."""
        self._votes, self._voted, self._job = votes, migration, None

    def job(self) -> Job:
        """Everything that was heard, and the crowd's votes if they are on the open migration."""
        if self._changed:
            self._take(self._changed)
            self._changed = {}
        if self._job is None:
            self._folded = self._folded or fold(self.keys, self._rest.values())
            job = replace(self._folded, members=dict(self._members), runs=dict(self._runs))
            if job.open_migration is not None and job.open_migration.id == self._voted:
                job = replace(job, votes={**self._votes, **job.votes})
            self._job = job
        return self._job

    def _take(self, changed: Mapping[str, KeyValue | None]) -> None:
        for key in changed:
            self._forget(key)
        part = fold(self.keys, [kv for kv in changed.values() if kv is not None])
        self._members.update(part.members)
        self._runs.update(part.runs)
        self._of_key.update({m.key: (host, None) for host, m in part.members.items()})
        self._of_key.update({r.key: (None, slot) for slot, r in part.runs.items()})
        rest = {k: kv for k, kv in changed.items() if kv is not None and k not in self._of_key}
        if rest:
            self._rest.update(rest)
            self._folded = None

    def _forget(self, key: str) -> None:
        host, slot = self._of_key.pop(key, (None, None))
        if host is not None:
            self._members.pop(host, None)
        if slot is not None:
            self._runs.pop(slot, None)
        if self._rest.pop(key, None) is not None:
            self._folded = None
