"""Read what people are shown of a job. May not know: how it is printed."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

from tmrun.cli import without_store
from tmrun.cli.jobs import Connection
from tmrun.core import codec, details, report
from tmrun.core.errors import StoreUnavailable
from tmrun.core.heard import Heard
from tmrun.core.membership import Job, fold
from tmrun.core.model import Event, Lag, Progress, RankMap, Receiving, Timing
from tmrun.core.txn import KeyValue
from tmrun.store.api import Changed, WatchEvent


def read_timings(connection: Connection, epoch: int | None = None) -> dict[int, list[Timing]]:
    """The workers' accounts of their switches, by epoch; of one epoch only when it is named."""
    prefix = connection.keys.timings(epoch)
    timings: dict[int, list[Timing]] = defaultdict(list)
    for kv in connection.store.list(prefix).entries:
        timings[int(connection.keys.parse(kv.key)[1][0])].append(codec.decode(Timing, kv.value))
    return timings


def read_maps(connection: Connection) -> list[RankMap]:
    """Every committed map."""
    return [codec.decode(RankMap, kv.value) for kv in connection.store.list(connection.keys.maps).entries]


def read_history(connection: Connection, job: Job) -> list[dict[str, Any]]:
    """Rows of ``core.report.history``."""
    return report.history(read_maps(connection), read_timings(connection), _nproc(job))


def _nproc(job: Job) -> int:
    return job.spec.nproc if job.spec else 1


def read_receiving(connection: Connection) -> list[Receiving]:
    """How much of their state joiners have."""
    return [codec.decode(Receiving, kv.value) for kv in connection.store.list(connection.keys.receivings).entries]


def read_status(connection: Connection) -> dict[str, Any]:
    """The value of ``core.report.status``."""
    took: list[float] = []

    def read(prefix: str) -> tuple[KeyValue, ...]:
        began = time.monotonic()
        entries = connection.store.list(prefix).entries
        took.append(time.monotonic() - began)
        return entries

    keys = connection.keys
    job = fold(keys, read(keys.ctl))
    told = {kv.key: kv.value for kv in read(keys.remarks)}
    timings = {job.epoch: [codec.decode(Timing, kv.value) for kv in read(keys.timings(job.epoch))]}
    heard = Heard(
        progress=[codec.decode(Progress, kv.value) for kv in read(keys.progresses)],
        reason=told.get(keys.reason, ""),
        overdue=int(told.get(keys.overdue, "0")),
        timings=timings[job.epoch],
        receiving=[codec.decode(Receiving, kv.value) for kv in read(keys.receivings)],
        lags=[codec.decode(Lag, value) for key, value in told.items() if key.startswith(keys.lag(""))],
        answer_s=min(took),
        now=time.time(),
    )
    return report.status(job, heard, report.history([job.map], timings, _nproc(job)) if job.map else [])


def status(connection: Connection) -> dict[str, Any]:
    """``read_status``, or what is known without the store when it does not answer."""
    try:
        return read_status(connection)
    except StoreUnavailable as error:
        return without_store.status(connection.keys.job, error)


def read_events(connection: Connection) -> list[dict[str, Any]]:
    """The whole story."""
    return details.events(codec.decode(Event, kv.value) for kv in connection.store.list(connection.keys.events).entries)


class Past:
    """History for somebody who looks again and again: what cannot change any more is read once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: dict[int, dict[str, Any]] = {}

    def rows(self, epoch: int, nproc: int) -> list[dict[str, Any]]:
        """Rows of ``core.report.history`` up to ``epoch``."""
        for wanted in range(1, epoch + 1):
            known = self._rows.get(wanted)
            if known is None or (known["pause_s"] is None and wanted > epoch - _STILL_TOLD):
                kv = self._connection.store.get(self._connection.keys.map(wanted))
                maps = [codec.decode(RankMap, kv.value)] if kv is not None else []
                self._rows |= {r["epoch"]: r for r in report.history(maps, read_timings(self._connection, wanted), nproc)}
        return [row for _, row in sorted(self._rows.items())]


_STILL_TOLD = 2
"""Workers may still tell of so many of the newest epochs."""


class Story:
    """The events for somebody who looks again and again; fed by a watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Event] = {}

    def feed(self, news: WatchEvent) -> None:
        """Called from the watch's thread."""
        found = [news.value] if isinstance(news, Changed) else news.listing.entries
        with self._lock:
            self._known |= {kv.key: codec.decode(Event, kv.value) for kv in found if kv is not None}

    def events(self) -> list[dict[str, Any]]:
        """All that was told so far."""
        with self._lock:
            return details.events(self._known.values())
