"""Who may be dead is asked about at its launch's witness: a real socket; the store is the model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from test_core import KEYS, member, running, seat
from tmrun_agent.inquest import MEET_AGAIN_S, Inquest

from tmrun import witness
from tmrun.core.codec import encode
from tmrun.core.membership import Job
from tmrun.core.model import Doubt, Host, Leader, Trouble
from tmrun.core.txn import Delete, Txn
from tmrun.store.memory import MemoryStore, MemoryWorld

ME, OTHER = seat("a"), Host("b")


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """Where the other host's witness is; nobody can reach it before it listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        yield found


class Asking:
    """An inquest of the coordinator, on a clock of its own."""

    def __init__(self, port: socket.socket) -> None:
        self.store: MemoryStore = MemoryWorld().client()
        self.now = 100.0
        self.told: list[str] = []
        self.inquest = Inquest(self.store, KEYS, ME, self.told.append, lambda: self.now)
        told = replace(member("b"), witness=witness.record("127.0.0.1", port, "marker"))
        self.store.put(KEYS.member("b"), encode(told))
        self.job: Job = running()
        self.doubted: Job = running((KEYS.doubt("a"), Doubt(ME.host, ME.incarnation, 1, "a connection broke")))

    def tend(self, job: Job, *, leads: bool = True) -> None:
        """A turn, and what it began."""
        self.inquest.tend(job, doubt=False, leads=leads)
        end = time.monotonic() + 60
        while self.inquest._busy.locked() or self.inquest._meeting.locked():
            assert time.monotonic() < end
            time.sleep(0.01)

    @property
    def buried(self) -> bool:
        return self.store.get(KEYS.obituary("b")) is not None


@pytest.fixture
def asking(port: socket.socket) -> Asking:
    return Asking(port)


def test_a_witness_that_was_not_reached_at_first_is_tried_again(asking: Asking, port: socket.socket) -> None:
    asking.tend(asking.job)
    port.listen()
    asking.now += MEET_AGAIN_S
    asking.tend(asking.job)
    port.close()
    asking.now += 1
    asking.tend(asking.doubted)
    assert asking.buried


def test_workers_that_ended_because_they_lost_a_peer_are_a_hint_too(asking: Asking, port: socket.socket) -> None:
    """Those of a plain script do not wait for an explanation; and whoever is not the coordinator asks about the coordinator."""
    port.listen()
    echo = Trouble(0, ME.host, ME.incarnation, 1, 0, 1, "exit code 1", software=True, echo=True)
    ends = running((KEYS.trouble(0), echo), (KEYS.leader, Leader(OTHER, seat("b").incarnation, 1)))
    asking.tend(asking.job)
    port.close()
    asking.now += 1
    asking.tend(replace(ends, troubles={0: replace(echo, echo=False)}), leads=False)
    assert not asking.buried, "it has an error of its own"
    asking.now += 1
    asking.tend(ends, leads=False)
    assert asking.buried


def test_a_lease_that_ran_out_does_not_take_the_witness_with_it(asking: Asking, port: socket.socket) -> None:
    port.listen()
    asking.tend(asking.job)
    port.close()
    asking.now += 1
    asking.tend(asking.job)
    assert not asking.buried, "nobody asks while all is well"
    asking.store.commit(Txn((), (Delete(KEYS.member("b")),), "its lease runs out"))
    silent = running(hosts=("a", "s"))
    for _ in range(2):
        asking.now += 1
        asking.tend(silent)
    assert asking.buried
    assert asking.told == ["b is gone: nothing of its launch is left, says its kernel: the port that all of its processes held is closed"]


def test_one_that_was_never_reached_is_not_believed(asking: Asking, port: socket.socket) -> None:
    for _ in range(3):
        asking.now += MEET_AGAIN_S
        asking.tend(asking.job)
    asking.tend(asking.doubted)
    assert not asking.buried


def test_it_is_not_tried_at_every_turn(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    answers = iter((False, True))

    def reached(where: str) -> bool:
        tried.append(where)
        return next(answers)

    monkeypatch.setattr(witness, "reached", reached)
    for _ in range(10):
        asking.tend(asking.job)
    assert len(tried) == 1
    for _ in range(10):
        asking.now += MEET_AGAIN_S
        asking.tend(asking.job)
    assert len(tried) == 2, "met"


def test_out_of_threads_it_is_tried_at_the_next_turn(asking: Asking, port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses its agent by that: neither when it gets to know others, nor when it asks."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    port.listen()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        asking.tend(asking.job)
    asking.tend(asking.job)
    port.close()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        asking.tend(asking.doubted)
    assert not asking.buried
    asking.tend(asking.doubted)
    assert asking.buried
