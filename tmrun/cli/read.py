"""Read what people are shown of a job. May not know: how it is printed."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from tmrun.cli.jobs import Connection
from tmrun.core import codec, details, report
from tmrun.core.membership import Job, fold
from tmrun.core.model import Event, Progress, RankMap, Timing


def read_timings(connection: Connection) -> dict[int, list[Timing]]:
    """The workers' accounts of their switches, by epoch."""
    timings: dict[int, list[Timing]] = defaultdict(list)
    for kv in connection.store.list(f"{connection.keys.log}timing/").entries:
        epoch = int(connection.keys.parse(kv.key)[1][0])
        timings[epoch].append(codec.decode(Timing, kv.value))
    return timings


def read_maps(connection: Connection) -> list[RankMap]:
    """Every committed map."""
    return [codec.decode(RankMap, kv.value) for kv in connection.store.list(connection.keys.maps).entries]


def read_events(connection: Connection) -> list[dict[str, Any]]:
    """The whole story."""
    return details.events(codec.decode(Event, kv.value) for kv in connection.store.list(connection.keys.events).entries)


def read_history(connection: Connection, job: Job) -> list[dict[str, Any]]:
    """Rows of ``core.report.history``."""
    return report.history(read_maps(connection), read_timings(connection), job.spec.nproc if job.spec else 1)


def read_status(connection: Connection) -> dict[str, Any]:
    """The value of ``core.report.status``."""
    store, keys = connection.store, connection.keys
    job = fold(keys, store.list(keys.ctl).entries)
    progress = [codec.decode(Progress, kv.value) for kv in store.list(f"{keys.log}progress/").entries]
    told = store.get(keys.reason)
    timings = read_timings(connection)
    rows = report.history(read_maps(connection), timings, job.spec.nproc if job.spec else 1)
    return report.status(job, progress, rows, told.value if told else "", timings.get(job.epoch, ()), time.time())
