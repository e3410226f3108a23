"""``tmrun events``: the story of a job, as its agents told it."""

from __future__ import annotations

import json
import queue
from typing import Any

import click

from tmrun.cli import jobs, options, read
from tmrun.cli.jobs import Connection
from tmrun.core import codec, details
from tmrun.core.model import Event
from tmrun.core.story import EventKind
from tmrun.store.api import Changed, WatchEvent
from tmrun.tui import views

_LOOK_S = 1.0


@click.command("events", short_help="What happened, line by line; -f goes on until the job ends.")
@options.job_argument
@options.output_option("text", "json")
@click.option("-f", "--follow", is_flag=True, help="Go on as things happen, until the job ends.")
@click.option("--kind", type=click.Choice([k.value for k in EventKind]), multiple=True, help="Only events of this kind. Repeatable.")
@click.option("-n", "--last", type=click.IntRange(0), metavar="N", help="Only the last N of those so far.")
def command(
    job_id: str | None,
    job: str | None,
    etcd: str | None,
    output: str,
    follow: bool,
    kind: tuple[str, ...],
    last: int | None,
) -> None:
    """Show the job's story. JSON: one object a line: {"api_version", "time", "node", "kind", "text"}.

    Times are the writers' wall clocks.
    """
    with jobs.connect(job_id or job, etcd) as connection:
        news: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()
        watch = connection.store.watch(connection.keys.events, news.put) if follow else None
        told = [e for e in read.read_events(connection) if not kind or e["kind"] in kind]
        for event in told if last is None else told[len(told) - last :]:
            _show(event, output)
        if watch is not None:
            try:
                _follow(connection, news, {_key(e) for e in told}, output, kind)
            finally:
                watch.close()


def _key(event: dict[str, Any]) -> tuple[float, str, str]:
    return event["time"], event["node"], event["text"]


def _follow(
    connection: Connection, news: queue.SimpleQueue[WatchEvent], told: set[tuple[float, str, str]], output: str, kind: tuple[str, ...]
) -> None:
    """A watch begins with all there is, and lists all anew after a gap: what was told already is not told again."""
    ended = False
    while True:
        try:
            event = news.get(timeout=_LOOK_S)
        except queue.Empty:
            if ended:
                return
            ended = connection.read().end is not None
            continue
        found = [event.value] if isinstance(event, Changed) else event.listing.entries
        for one in details.events(codec.decode(Event, kv.value) for kv in found if kv is not None):
            if _key(one) not in told and (not kind or one["kind"] in kind):
                told.add(_key(one))
                _show(one, output)


def _show(event: dict[str, Any], output: str) -> None:
    click.echo(json.dumps({"api_version": options.API_VERSION, **event}) if output == "json" else views.event_line(event))
