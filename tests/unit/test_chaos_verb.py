"""``tmrun chaos``: what it asks, what it refuses, and that a node does it once; the node's agent is real, its hands are not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_verbs import KEYS, job, seat, store, tmrun
from tmrun_agent import chaos as hands
from tmrun_agent.chaos import Chaos

from tmrun.cli import chaos, jobs
from tmrun.core.codec import encode
from tmrun.core.model import (
    Cause,
    End,
    Event,
    Fault,
    FaultKind,
    Head,
    Host,
    Incarnation,
    Incident,
    JobState,
    Kind,
    Move,
    Pause,
    RankMap,
    Resume,
    Run,
    Seat,
    Spec,
    Timing,
)
from tmrun.core.node import Group, Purpose
from tmrun.store.memory import MemoryStore

__all__ = ["store", "tmrun"]
GROUP = Group(Purpose.ACTIVE, 1, 2, 1, (501, 502))


class Hands:
    """What an agent would have done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[tuple[Any, ...]] = []
        monkeypatch.setattr(hands.os, "kill", lambda pid, number: self.did.append(("kill", pid, number.name)))

    def wait_for(self, count: int) -> None:
        """What it does follows what it says."""
        end = time.monotonic() + 20
        while len(self.did) < count and time.monotonic() < end:
            time.sleep(0.01)

    def signal(self, number: Any) -> None:
        self.did.append(("all", number.name))

    def cut_off(self, seconds: float) -> None:
        self.did.append(("cut", seconds))


@pytest.fixture
def played(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hands]:
    """node1's agent looks at its keys all the time."""
    played = Hands(monkeypatch)
    agent = Chaos(seat("node1"), played, played, lambda txn: store.commit(txn).succeeded)  # type: ignore[arg-type]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            agent.tend(job(store), GROUP)

    thread = threading.Thread(target=look)
    thread.start()
    yield played
    ended.set()
    thread.join()


@pytest.mark.parametrize(
    ("words", "did", "told"),
    [
        (("kill", "node1"), [("kill", 501, "SIGKILL")], "SIGKILL to worker 0 of node1 (pid 501)"),
        (("freeze", "node1", "--rank", "3"), [("kill", 502, "SIGSTOP")], "SIGSTOP to worker 1 of node1 (pid 502)"),
        (("kill", "node1", "--agent"), [("kill", os.getpid(), "SIGKILL")], f"SIGKILL to the agent of node1 (pid {os.getpid()})"),
        (("partition", "node1", "--for", "0.2s"), [("all", "SIGSTOP"), ("cut", 0.2)], "node1 is cut off for 0.2 s"),
    ],
    ids=lambda v: " ".join(map(str, v)) if isinstance(v, tuple) else "",
)
def test_the_agent_does_it_once(tmrun: Any, store: MemoryStore, played: Hands, words: tuple[str, ...], did: Any, told: str) -> None:
    answer = tmrun("chaos", *words, "--detach", "-y")
    assert (answer.code, answer.out.strip()) == (0, told), answer.err
    healed = [("all", "SIGCONT")] if words[0] == "partition" else []
    played.wait_for(len(did) + len(healed))
    assert played.did == did + healed
    assert any(line.endswith(", asked for by an operator") for line in tmrun("events", "--kind", "chaos").out.splitlines())
    again = tmrun("chaos", "kill", "node1", "--detach", "-y")
    played.wait_for(len(did) + len(healed) + 1)
    assert again.code == 0 and played.did[-1] == ("kill", 501, "SIGKILL"), "the next one replaces what is over"


def test_it_watches_until_the_job_trains_again(tmrun: Any, store: MemoryStore, played: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "_LOOK_S", 0.05)
    late = tmrun("chaos", "kill", "node1", "-y", "--deadline", "100ms")
    assert late.code == 4 and "not over within 0.1 s; see `tmrun status`" in late.err
    seats = (*map(seat, ("node0", "node10", "node2", "node3")),)
    moved = RankMap(3, Kind.FAILURE, seats, 1, 2, (Move(1, seat("node1"), seat("node10")),), Resume(61), "killed")
    news = {
        KEYS.event("node0.1", 9): Event(2e9, Host("node0"), "committed epoch 3"),
        KEYS.run(1): Run(1, Host("node10"), seat("node10").incarnation, 3, (21, 22), True),
        KEYS.map(3): moved,
        KEYS.head: Head(3, 0, 2),
        KEYS.timing(3, 0): Timing(0, "stayer", {"wait": 0.2}, redo_s=0.1, pause_s=0.4, resumed=True),
        KEYS.timing(3, 2): Timing(2, "joiner", {"state": 0.1}, bytes=10),
    }

    def heal() -> str:
        for key, record in news.items():
            store.put(key, encode(record))
        return ""

    real = chaos._outcome
    monkeypatch.setattr(chaos, "_outcome", lambda c, b: heal() if job(store).epoch == 2 else real(c, b))
    told = tmrun("chaos", "kill", "node1", "-y")
    assert told.code == 0, told.err
    assert "node0: committed epoch 3" in told.out and told.out.splitlines()[-1].startswith("epoch 3: step 61 ran; paused 0.40 s (")


def test_a_worker_that_is_not_there_is_nothing_to_do(
    tmrun: Any, store: MemoryStore, played: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("c-1", Host("node1"), seat("node1").incarnation, FaultKind.KILL, local_rank=7)
    store.put(KEYS.fault("node1"), encode(fault))
    for _ in range(500):
        if job(store).faults[Host("node1")].told:
            break
        threading.Event().wait(0.01)
    assert job(store).faults[Host("node1")].told == "nothing: node1 runs no worker 7 now" and played.did == []


def test_a_later_life_of_the_node_is_not_meant(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEYS.fault("node1"), encode(Fault("c-1", Host("node1"), seat("node1").incarnation, FaultKind.KILL)))
    played = Hands(monkeypatch)
    for me in (Seat(Host("node1"), Incarnation("node1.2")), seat("node2")):
        Chaos(me, played, played, lambda _: True).tend(job(store), GROUP)  # type: ignore[arg-type]
    assert played.did == []


def test_it_asks_and_says_what_to_expect(tmrun: Any, store: MemoryStore) -> None:
    asked = tmrun("chaos", "kill", "node1")
    assert asked.code == 2 and "kill rank 2 of node1: a warm standby takes ranks 2-3 over. Do it? not asked" in asked.err
    assert "freeze the agent of node10: it holds no ranks; training goes on" in tmrun("chaos", "freeze", "node10", "--agent").err
    assert "cut node0 off for 18 s" in tmrun("chaos", "partition", "node0").err
    tmrun("cordon", "node[10-11]")
    assert "no standby is warm, nobody can take ranks 2-3 over yet" in tmrun("chaos", "kill", "node1").err
    for slot in range(4):
        store.put(KEYS.run(slot), encode(Run(slot, Host(f"node{slot}"), seat(f"node{slot}").incarnation, 3, (11, 12))))
    assert "kill rank 2 of node1: the script has not reached run.steps: all workers restart" in tmrun("chaos", "kill", "node1").err
    seats = tuple(seat(f"node{i}") for i in range(4))
    store.put(KEYS.map(3), encode(RankMap(3, Kind.RESTART, seats, 3, incidents=(Incident(Host("node1"), 2, Cause.KILLED),), row=1)))
    store.put(KEYS.head, encode(Head(3, 0, 1)))
    assert "all workers restart" in tmrun("chaos", "kill", "node1").err, "--max-restarts is 3"
    store.put(KEYS.map(3), encode(RankMap(3, Kind.RESTART, seats, 3, incidents=(Incident(Host("node1"), 2, Cause.KILLED),), program=True)))
    store.put(KEYS.spec, encode(Spec(4, 2, 2, ("train.py",), max_restarts=1)))
    assert "rank 2 was killed before, and the script has not reached run.steps: the job ends" in tmrun("chaos", "kill", "node1").err
    assert "all workers restart" in tmrun("chaos", "kill", "node1", "--rank", "3").err
    assert job(store).faults == {}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("kill", "node1", "--rank", "0"), 7, "node1 has no rank 0; it has ranks 2-3"),
        (("kill", "node10", "--rank", "0"), 7, "node10 has no rank 0; it has none"),
        (("kill", "node1", "--rank", "2", "--agent"), 2, "exclude each other"),
        (("kill", "node1", "--for", "3s"), 2, "--for goes with partition"),
        (("partition", "node1", "--agent"), 2, "a partition cuts the whole node off"),
        (("kill", "node[1-2]"), 2, "one node at a time"),
        (("kill", "nobody"), 7, "no node 'nobody'"),
        (("burn", "node1"), 2, "'burn' is not one of"),
    ],
)
def test_bad_wishes_are_one_line(tmrun: Any, words: tuple[str, ...], code: int, told: str) -> None:
    answer = tmrun("chaos", *words, "-y")
    assert answer.code == code and told in answer.err and answer.err.count("\n") == 1, answer.err


def test_what_cannot_be_done_is_refused(tmrun: Any, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from tmrun.core.txn import Delete, Txn

    monkeypatch.setattr(chaos, "_TAKE_S", 0.1)
    nobody = tmrun("chaos", "kill", "node2", "-y")
    assert nobody.code == 1 and "the agent of node2 did not take it within 0.1 s; it is taken back, nothing was done" in nobody.err
    assert job(store).faults == {}
    store.put(KEYS.fault("node2"), encode(Fault("c-1", Host("node2"), seat("node2").incarnation, FaultKind.KILL)))
    assert "node2 has not carried out what was asked of it before" in tmrun("chaos", "kill", "node2", "-y").err
    store.commit(Txn((), (Delete(KEYS.member("node3")), Delete(KEYS.fault("node2"))), "gone"))
    silent = tmrun("chaos", "kill", "node3", "-y")
    assert silent.code == 3 and "node3 does not answer: there is no agent that could do it" in silent.err
    store.put(KEYS.pause, encode(Pause("x")))
    assert tmrun("chaos", "kill", "node1", "-y").code == 3
    store.put(KEYS.end, encode(End(JobState.SUCCEEDED, 0, "done")))
    assert tmrun("chaos", "kill", "node1", "-y").code == 1
    assert jobs.Connection(store, KEYS).read().faults == {}
