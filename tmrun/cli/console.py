"""What a launcher tells its user: each event, the live line, the pause after a migration, and what all of it cost at the end.

May not know: agents, how a job is launched or ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tmrun.cli import read
from tmrun.cli.hooks import Hooks, Wanted
from tmrun.cli.jobs import Connection
from tmrun.core import codec, details, report
from tmrun.core.heard import Heard
from tmrun.core.membership import Job
from tmrun.core.model import Event, Progress, RankMap, Timing
from tmrun.core.story import EventKind, Outages
from tmrun.store.api import Changed, WatchEvent
from tmrun.tui import launch_view
from tmrun.tui.footer import Footer

SHOW_S = 1.0
SHOW_SELDOM_S = 10.0
_PAUSE_WAIT_S = 30.0
_LAUNCHER = ""
"""Who tells of an outage, beside nodes."""


@dataclass
class Console:
    """Of one launcher; ``own``: the names of its nodes. Used from the launcher's one thread."""

    connection: Connection
    own: tuple[str, ...]
    wanted_hooks: Wanted
    footer: Footer
    hooks: Hooks = field(init=False)
    _show_at: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _untold: dict[int, float] = field(default_factory=dict)
    """Epoch of a migration whose pause has not been told yet -> until when it is waited for."""
    _epoch: int = 0
    _step: int | None = None
    _outages: Outages = field(default_factory=Outages)

    def __post_init__(self) -> None:
        self.hooks = Hooks(self.wanted_hooks, self.say)

    def say(self, text: str) -> None:
        """A line."""
        self.footer.say(f"tmrun: {text}")

    def tell(self, event: WatchEvent) -> None:
        """An event of the job; those of our own nodes go to the hooks too."""
        if isinstance(event, Changed) and event.value is not None:
            told = codec.decode(Event, event.value.value)
            if self._is_news(told):
                self.say(told.text)
            if told.host in self.own:
                self.hooks.tell({"api_version": report.API_VERSION, "job": self.connection.keys.job, **details.event(told)})

    def _is_news(self, told: Event) -> bool:
        """Every agent tells of an outage of the store."""
        match told.kind:
            case EventKind.STORE.value:
                return self._outages.began(told.host, told.time)
            case EventKind.STORE_BACK.value:
                return self._outages.ended(told.host, told.time)
            case _:
                return True

    def store_is_silent(self, text: str) -> None:
        """This launcher has no answer from the store; said again and again."""
        if self._outages.began(_LAUNCHER, time.time()):
            self.say(text)

    def store_answers(self) -> None:
        """It has one; said again and again."""
        if self._outages.ended(_LAUNCHER, time.time()):
            self.say("the store answers again")

    def show(self) -> None:
        """What is going on: once a second where somebody looks on, seldom in other hosts' logs (each look reads the whole job)."""
        if time.monotonic() < self._show_at:
            return
        job = self.connection.read()
        self._show_at = time.monotonic() + (SHOW_S if job.map is None or self._looks_on(job) else SHOW_SELDOM_S)
        if job.end is not None:
            return
        store, keys = self.connection.store, self.connection.keys
        found = [store.get(keys.progress(host)) for host in self.own]
        progress = [codec.decode(Progress, kv.value) for kv in found if kv is not None]
        reason = store.get(keys.reason)
        watched = job.epoch in self._untold
        timings = self._timings(job.epoch) if watched else []
        receiving = read.read_receiving(self.connection) if watched else []
        status = report.status(job, Heard(progress, reason.value if reason else "", timings=timings, receiving=receiving))
        if job.open_migration is None and not watched:
            status["migration"] = None  # without the workers' accounts nobody here knows whether it is over
        self._step = max((p.step for p in progress), default=self._step)
        self.footer.show(*launch_view.line(status, self.own, bars=self.footer.live))
        self._tell_pauses(job)

    def _looks_on(self, job: Job) -> bool:
        """Who reads what all workers said of a switch: a person's terminal, and the launcher of the first slot for its log."""
        return self.footer.live or (job.map is not None and job.map.seats[0].host in self.own)

    def _timings(self, epoch: int) -> list[Timing]:
        return read.read_timings(self.connection, epoch).get(epoch, [])

    def _tell_pauses(self, job: Job) -> None:
        """After a migration its pause, once all workers have told."""
        if job.map is not None and job.epoch != self._epoch:
            self._epoch = job.epoch
            if job.map.moves and self._looks_on(job):
                self._untold[job.epoch] = time.monotonic() + _PAUSE_WAIT_S
        for epoch, until in list(self._untold.items()):
            kv = self.connection.store.get(self.connection.keys.map(epoch))
            maps = [codec.decode(RankMap, kv.value)] if kv else []
            rows = report.history(maps, {epoch: self._timings(epoch)}, job.spec.nproc if job.spec else 1)
            told = bool(rows) and rows[0]["pause_s"] is not None
            if told:
                self.say(launch_view.migrated(rows[0]))
            if told or time.monotonic() > until:
                del self._untold[epoch]

    def close(self) -> None:
        """The terminal is whole again, and hooks have had their time."""
        self.footer.close()
        self.hooks.close()

    def summary(self, job: Job) -> None:
        """What all migrations cost."""
        self.footer.close()
        if job.end is None or not self._looks_on(job):
            return
        rows = read.read_history(self.connection, job)
        wall_s = time.monotonic() - self._began
        for line in launch_view.ending(self.connection.keys.job, job.end.state.value, rows, self._step, wall_s):
            self.say(line)
