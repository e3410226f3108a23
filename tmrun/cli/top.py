"""``tmrun top``: the live view. Reads the store, carries out what the user confirms; what is drawn is in ``tui``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import click
from rich.console import RenderableType

from tmrun.cli import drain, jobs, logs, options, read, without_store
from tmrun.cli.jobs import Connection
from tmrun.core import report, transactions
from tmrun.core.errors import RefusedError, StoreError, StoreUnavailable, TmrunError
from tmrun.core.model import Host, Pause
from tmrun.store.api import WatchEvent
from tmrun.tui import live, views
from tmrun.tui.ui import Order, Shown, Ui, press
from tmrun.tui.views import Screen

_EVERY_S = 1.0
_STALE_S = 3.0


@click.command("top", short_help="Full-screen live view: nodes, the migration by phases, events. Keys: ? for help.")
@options.job_argument
@click.option("--plain", is_flag=True, help="A line whenever something changes, as without a terminal or with NO_COLOR.")
@click.option("--every", type=options.Duration(), default=_EVERY_S, help="How often to look at least.", metavar="DURATION")
def command(job_id: str | None, job: str | None, etcd: str | None, plain: bool, every: float) -> None:
    """Watch a job. Nothing is changed unless you confirm it. Without a terminal: plain lines, until the job ends."""
    with jobs.connect(job_id or job, etcd) as connection:
        if plain or not live.can_draw():
            _lines(connection, every)
        else:
            _Top(connection, every).run()


def _lines(connection: Connection, every_s: float) -> None:
    """A line whenever the state changes, and the events between; steps alone are told ten times more seldom."""
    told, events, count = "", 0, 0
    while True:
        status = read.status(connection)
        story = read.read_events(connection) if status["state"] != report.UNKNOWN else []
        for event in story[events:] if events else story[-1:]:
            click.echo(views.event_line(event))
        events = max(events, len(story))
        still = views.plain_line({**status, "step": None, "step_s": None, **({"reason": ""} if status["state"] == report.UNKNOWN else {})})
        if still != told or count % 10 == 0:
            click.echo(f"{time.strftime('%H:%M:%S')} {views.plain_line(status)}")
        told, count = still, count + 1
        if status["exit_code"] is not None:
            return
        time.sleep(every_s)


@dataclass
class _Top:
    connection: Connection
    every_s: float
    ui: Ui = field(default_factory=Ui)
    size: tuple[int, int] = (80, 24)
    _migration: tuple[int, float] = (0, 0.0)
    _received: dict[str, tuple[float, int]] = field(default_factory=dict)
    _screen: Screen | None = None
    _reader: live.Reader[Screen] | None = None
    _past: read.Past | None = None
    _story: read.Story = field(default_factory=read.Story)

    def run(self) -> None:
        """Until the user quits."""
        self._past = read.Past(self.connection)
        told = self.connection.store.watch(self.connection.keys.events, self._story.feed)
        self._screen = self._first()
        reader = self._reader = live.Reader(self._read, self.every_s)

        def wake(_: WatchEvent) -> None:
            reader.wake()

        watch = self.connection.store.watch(self.connection.keys.ctl, wake)
        try:
            live.full_screen(self._draw, self._press)
        finally:
            told.close()
            watch.close()
            reader.close()

    def _first(self) -> Screen:
        try:
            return self._read()
        except StoreUnavailable as error:
            return Screen(without_store.status(self.connection.keys.job, error))

    def _read(self) -> Screen:
        assert self._past is not None
        status: dict[str, Any] = read.read_status(self.connection)
        rows = self._past.rows(status["epoch"], status["nproc"] or 1)
        said = logs.tail(self.connection, self.ui.selected) if self.ui.page == "logs" else ()
        self._pace(status["migration"])
        return Screen(status, rows, self._story.events(), self._since(status["migration"]), logs=said)

    def _pace(self, migration: dict[str, Any] | None) -> None:
        """How fast state comes in, from two looks at it."""
        now, before = time.monotonic(), self._received
        self._received = {t["node"]: (now, t["done"]) for t in migration["transfers"]} if migration else {}
        for one in migration["transfers"] if migration else ():
            then, had = before.get(one["node"], (now, one["done"]))
            if one["done"] > had and now > then:
                one["rate"] = (one["done"] - had) / (now - then)
                one["left_s"] = (one["total"] - one["done"]) / one["rate"]

    def _since(self, migration: dict[str, Any] | None) -> float | None:
        if migration is None:
            return None
        if self._migration[0] != migration["id"]:
            self._migration = (migration["id"], time.monotonic())
        return time.monotonic() - self._migration[1]

    def _draw(self, width: int, height: int) -> RenderableType:
        assert self._reader is not None and self._screen is not None
        self.size = (width, height)
        newest = self._reader.value or self._screen
        silent = time.monotonic() - self._reader.read_at if isinstance(self._reader.error, StoreError) else 0.0
        if silent > _STALE_S:
            newest = replace(newest, status=views.stale(newest.status, silent, without_store.seen(self.connection.keys.job)))
        self._screen = newest
        return views.top(self._screen, width, height, self.ui)

    def _press(self, key: str) -> bool:
        assert self._screen is not None
        nodes = self._screen.status["nodes"]
        shown = Shown(
            tuple(n["name"] for n in nodes),
            tuple(n["name"] for n in nodes if n["state"] not in ("active", "standby")),
            frozenset(n["name"] for n in nodes if n["cordoned"]),
            self._screen.status["paused"] is not None,
            views.columns(self._screen, *self.size),
            len(self._screen.events),
        )
        self.ui, order = press(self.ui, key, shown)
        if order is not None:
            self.ui = Ui(self.ui.selected, self.ui.page, self.ui.scroll, said=self._carry_out(order))
        return not self.ui.done

    def _carry_out(self, order: Order) -> str:
        """What came of it, in a line."""
        try:
            return _order(self.connection, order)
        except TmrunError as error:
            return str(error)


def _order(connection: Connection, order: Order) -> str:
    current, hosts = connection.read(), (Host(order.node),)
    jobs.still_running(current)
    if order.verb == "drain":
        op = drain.request(connection, current, hosts, "drained from tmrun top", tell=lambda _: None)
        return f"{order.node} cordoned (op {op.id}); its ranks move at the next step boundary"
    txn = {
        "cordon": lambda: transactions.cordon(current, hosts, "cordoned from tmrun top"),
        "uncordon": lambda: transactions.uncordon(current, hosts),
        "pause": lambda: transactions.pause(current, Pause("paused from tmrun top")),
        "resume": lambda: transactions.resume(current),
    }[order.verb]()
    if not connection.store.commit(txn).succeeded:
        raise RefusedError("the job's state changed meanwhile; try again")
    return f"{order.node or 'job'}: {order.verb} done"
