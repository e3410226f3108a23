"""What a launcher tells its user, against the model of the store."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from test_verbs import ACTIVE, KEYS, job, seat, store

from tmrun.cli import console as consoles
from tmrun.cli.console import Console
from tmrun.cli.hooks import Wanted
from tmrun.cli.jobs import Connection
from tmrun.core.codec import encode
from tmrun.core.model import End, Event, Head, Host, JobState, Kind, Move, RankMap, Resume, Timing
from tmrun.store.memory import MemoryStore
from tmrun.tui.footer import Footer

__all__ = ["store"]


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def make(store: MemoryStore, out: io.StringIO, monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...] = ("node0",)) -> Console:
    monkeypatch.setattr(consoles, "SHOW_S", 0.0)
    return Console(Connection(store, KEYS), own, Wanted(), Footer(out))


def test_the_line_is_told_and_the_pause_after_a_migration(store: MemoryStore, out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    console = make(store, out, monkeypatch)
    console.show()
    assert "tmrun: train running  step 60 (0.10 s a step)  epoch 2  standby 2/2 warm  node0 active\n" in out.getvalue()
    seats = tuple(map(seat, (*ACTIVE[:3], "node10")))
    moves = (Move(3, seat("node3"), seat("node10")),)
    store.put(KEYS.map(3), encode(RankMap(3, Kind.FAILURE, seats, 1, 2, moves, Resume(61), "killed")))
    store.put(KEYS.head, encode(Head(3, 0, 2)))
    for _ in range(2):
        console.show()
    assert "step 61 ran" not in out.getvalue(), "nobody has told how it fared"
    for rank in range(6):
        store.put(KEYS.timing(3, rank), encode(Timing(rank, "stayer", {"wait": 0.2}, redo_s=0.1, pause_s=0.4, resumed=True)))
    store.put(KEYS.timing(3, 6), encode(Timing(6, "joiner", {"state": 0.1}, bytes=10)))
    for _ in range(2):
        console.show()
    assert out.getvalue().count("tmrun: step 61 ran; paused 0.40 s (") == 1
    console.close()


def test_events_are_told_and_the_end_sums_up(store: MemoryStore, out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    console = make(store, out, monkeypatch)
    watch = store.watch(KEYS.events, console.tell)
    store.put(KEYS.event("node1.1", 7), encode(Event(1.0, Host("node1"), "something happened")))
    assert out.getvalue().count("tmrun: something happened\n") == 1
    store.put(KEYS.end, encode(End(JobState.SUCCEEDED, 0, "done")))
    console.show()
    console.summary(job(store))
    assert "tmrun: epoch 2 drain node9 -> node3 (ranks 6-7), paused 0.90 s" in out.getvalue()
    assert ": 1 migration, 0.90 s paused in all\n" in out.getvalue()
    watch.close()


def test_other_hosts_logs_do_not_read_what_all_workers_say(store: MemoryStore, out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    console = make(store, out, monkeypatch, own=("node10",))
    console.show()
    assert "standby 2/2 warm  node10 standby" in out.getvalue()
    store.put(KEYS.end, encode(End(JobState.SUCCEEDED, 0, "done")))
    console.summary(replace(job(store)))
    assert "in all" not in out.getvalue()


def test_an_outage_is_told_once_however_many_tell_of_it(store: MemoryStore, out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    console = make(store, out, monkeypatch)
    watch = store.watch(KEYS.events, console.tell)

    def agents(kind: str, time: float, *nodes: str) -> None:
        for node in nodes:
            store.put(KEYS.event(f"{node}.{kind}", int(time)), encode(Event(time, Host(node), f"{node} {kind}", kind)))

    monkeypatch.setattr(consoles.time, "time", lambda: 100.0)
    for _ in range(3):
        console.store_is_silent("no answer; training goes on")
    monkeypatch.setattr(consoles.time, "time", lambda: 130.0)
    for _ in range(3):
        console.store_answers()
    agents("store", 101.0, "node0", "node1", "node2")
    agents("store_back", 131.0, "node0", "node1", "node2")
    assert out.getvalue().splitlines() == ["tmrun: no answer; training goes on", "tmrun: the store answers again"]
    agents("store", 200.0, "node1", "node2")
    agents("store_back", 210.0, "node1")
    assert out.getvalue().splitlines()[2:] == ["tmrun: node1 store"], "what this launcher has not noticed is told as well"
    agents("store_back", 211.0, "node2")
    assert out.getvalue().splitlines()[3:] == ["tmrun: node2 store_back"]
    watch.close()
