"""``tmrun events``: the story of a job, as its agents told it."""

from __future__ import annotations

import json
import queue
from collections.abc import Sequence
from contextlib import closing
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
        known = read.read_events(connection)
        told = [e for e in known if not kind or e["kind"] in kind]
        for event in told if last is None else told[max(0, len(told) - last) :]:
            _show(event, output)
        if follow:
            with closing(Stream(connection, known)) as stream:
                _follow(connection, stream, output, kind)


class Stream:
    """What is told from now on, each event once. A watch begins with all there is, and lists all anew after a gap: what is ``known`` is
    not told again. Raises StoreError."""

    def __init__(self, connection: Connection, known: Sequence[dict[str, Any]]) -> None:
        self._told = {_key(event) for event in known}
        self._news: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()
        self._watch = connection.store.watch(connection.keys.events, self._news.put)

    def next(self, wait_s: float) -> list[dict[str, Any]] | None:
        """New events, in the order of time; None: the watch has said nothing for so long."""
        try:
            event = self._news.get(timeout=wait_s)
        except queue.Empty:
            return None
        found = [event.value] if isinstance(event, Changed) else event.listing.entries
        new = [e for e in details.events(codec.decode(Event, kv.value) for kv in found if kv is not None) if _key(e) not in self._told]
        self._told |= {_key(e) for e in new}
        return new

    def close(self) -> None:
        """Listen no more."""
        self._watch.close()


def _key(event: dict[str, Any]) -> tuple[float, str, str]:
    return event["time"], event["node"], event["text"]


def _follow(connection: Connection, stream: Stream, output: str, kind: tuple[str, ...]) -> None:
    """Until the job has ended and nothing more is told of it."""
    ended = False
    while True:
        found = stream.next(_LOOK_S)
        if found is None and ended:
            return
        if found is None:
            ended = connection.read().end is not None
        for one in found or ():
            if not kind or one["kind"] in kind:
                _show(one, output)


def _show(event: dict[str, Any], output: str) -> None:
    click.echo(json.dumps({"api_version": options.API_VERSION, **event}) if output == "json" else views.event_line(event))
