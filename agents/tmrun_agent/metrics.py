"""Metrics of one agent over HTTP, for Prometheus. Off unless asked for; nobody is authenticated, so it listens on loopback unless told
otherwise.

The agent's thread puts what it knows; the server's threads read the newest. May not know: what the numbers mean (``core.ledger``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tmrun import __version__
from tmrun.core import ledger as books
from tmrun.core.ledger import Family, Ledger
from tmrun.core.membership import Job
from tmrun.core.model import Copies, Host, Kind, Timing


@dataclass(eq=False)
class Metrics:
    """The newest of everything; also kept when nobody listens, because it costs next to nothing."""

    job_id: str
    host: Host
    ledger: Ledger = field(default_factory=Ledger)
    _job: Job | None = None
    _store_answers: bool = True
    _migrating: tuple[int, float] = (0, 0.0)
    _server: Any = None

    # -- the agent's side
    def progress(self, step: int, step_s: float) -> None:
        """How far the slowest worker is."""
        self.ledger = books.progress(self.ledger, step, step_s, time.monotonic())

    def copied(self, local: int, copies: Copies) -> None:
        """A worker's state was copied to its partner."""
        self.ledger = books.copied(self.ledger, local, copies)

    def timing(self, epoch: int, kind: Kind, told: Timing) -> None:
        """How a worker fared in a switch."""
        self.ledger = books.timing(self.ledger, epoch, kind, told)

    def seen(self, job: Job, *, store_answers: bool) -> None:
        """What is known of the job now."""
        self._job, self._store_answers = job, store_answers
        number = job.open_migration.id if job.open_migration else 0
        if number != self._migrating[0]:
            self._migrating = (number, time.monotonic())

    # -- the listeners' side
    def families(self) -> list[Family]:
        """Everything this node exports now."""
        job, now = self._job, time.monotonic()
        if job is None:
            return []
        found = books.of_node(self.ledger, job, self.host, now, store_answers=self._store_answers)
        if job.leader is not None and job.leader.value.host == self.host:
            found += books.of_job(job, now - self._migrating[1] if self._migrating[0] else 0.0)
        return found

    def collect(self) -> Iterator[Any]:
        """prometheus_client's interface of a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        always = {"job": self.job_id, "node": self.host}
        info = InfoMetricFamily("tmrun", "Version of the agent.")
        info.add_metric([], {**always, "version": __version__})
        yield info
        for family in self.families():
            names = [*always, *(family.samples[0][0] if family.samples else ())]
            cls = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            told = cls(family.name, family.help, labels=names)
            for labels, value in family.samples:
                told.add_metric([*always.values(), *labels.values()], value)
            yield told

    def serve(self, where: str) -> str:
        """Listen on ``HOST:PORT``; what to tell about it. Metrics never cost a job: what is wrong is told, not raised."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            return "no metrics: prometheus-client is not installed on this host; pip install 'tmrun[metrics]'"
        host, _, port = where.rpartition(":")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, _ = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            return f"no metrics: cannot listen on {where}: {error.strerror}; choose another --metrics port"
        return f"metrics on http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
