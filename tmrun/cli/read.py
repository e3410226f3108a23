"""Read what people are shown of a job. May not know: how it is printed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tmrun.cli.jobs import Connection
from tmrun.core import codec, report
from tmrun.core.membership import Job, fold
from tmrun.core.model import Progress, RankMap, Timing


def read_history(connection: Connection, job: Job) -> list[dict[str, Any]]:
    """Rows of ``core.report.history``."""
    store, keys = connection.store, connection.keys
    maps = [codec.decode(RankMap, kv.value) for kv in store.list(f"{keys.ctl}map/").entries]
    timings: dict[int, list[Timing]] = defaultdict(list)
    for kv in store.list(f"{keys.log}timing/").entries:
        epoch = int(keys.parse(kv.key)[1][0])
        timings[epoch].append(codec.decode(Timing, kv.value))
    return report.history(maps, timings, job.spec.nproc if job.spec else 1)


def read_status(connection: Connection) -> dict[str, Any]:
    """The value of ``core.report.status``."""
    store, keys = connection.store, connection.keys
    job = fold(keys, store.list(keys.ctl).entries)
    progress = [codec.decode(Progress, kv.value) for kv in store.list(f"{keys.log}progress/").entries]
    told = store.get(keys.reason)
    return report.status(job, progress, read_history(connection, job), told.value if told else "")
