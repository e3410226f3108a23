"""How far the job is: nobody's earlier life is told as news, and news is told although there is much else to tell."""

from __future__ import annotations

import time

from test_core import KEYS, running, seat
from test_details import moved
from tmrun_agent.publisher import Publisher

from tmrun.core import progress, report
from tmrun.core.codec import decode
from tmrun.core.heard import Heard
from tmrun.core.membership import Job
from tmrun.core.model import Head, Host, Kind, Progress, RankMap
from tmrun.store.memory import MemoryWorld

A, B, S = Host("a"), Host("b"), Host("s")


def steps(job: Job, *told: Progress) -> dict[str, int]:
    return {host: p.step for host, p in progress.of_seats(job, told).items()}


def test_a_joiner_that_was_here_before_is_not_where_it_was_then() -> None:
    stayer, old, new = Progress(A, 7, 0.1, epoch=1), Progress(S, 2, 0.1, epoch=1), Progress(S, 8, 0.1, epoch=2)
    assert steps(moved(), stayer, old) == {"a": 7}
    assert report.status(moved(), Heard([stayer, old]))["step"] == 7, "not 2"
    assert steps(moved(), stayer, new) == {"a": 7, "s": 8}
    assert steps(moved(), Progress(S, 2, 0.1)) == {"s": 2}, "an older tmrun does not say"
    assert steps(moved(), stayer, Progress(B, 9, 0.1, epoch=2)) == {"a": 7}, "b holds no slot"
    assert progress.slowest(moved(), {}) is None and steps(Job(KEYS), stayer) == {}


def test_after_a_restart_of_all_nobody_is_where_the_last_attempt_was() -> None:
    again = RankMap(2, Kind.RESTART, (seat("a"), seat("b")), 2)
    job = running((KEYS.head, Head(2)), (KEYS.map(2), again))
    assert steps(job, Progress(A, 500, 0.1, epoch=1), Progress(B, 3, 0.1, epoch=2)) == {"b": 3}


def test_progress_is_told_although_there_is_much_else_to_tell() -> None:
    store = MemoryWorld().client()
    publisher = Publisher(store, KEYS, A, "1")
    try:
        publisher.progress(1, 5, 0.1, 0.0)
        end = time.monotonic() + 10
        while (found := store.get(KEYS.progress(A))) is None or decode(Progress, found.value).step != 6:
            assert time.monotonic() < end, found
            publisher.event("something else")
            publisher.progress(1, 6 if found else 5, 0.1, 0.0)
            time.sleep(0.02)
    finally:
        publisher.close()
