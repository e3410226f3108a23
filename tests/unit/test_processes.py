"""The end of each worker is told, whatever it left behind and whatever this host ran out of."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tmrun_agent import processes as module
from tmrun_agent.logs import WorkerOutput
from tmrun_agent.processes import Ended, Processes, Worker


class Told:
    """Processes with a grace period of a second, and what they told."""

    def __init__(self) -> None:
        self.ends: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self.processes = Processes(self.ends.put, 1.0)

    def start(self, script: str) -> None:
        self.processes.spawn([Worker(("sh", "-c", script), os.environ, WorkerOutput("", ""))])


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.processes.close()


@pytest.mark.parametrize(
    ("script", "code", "summary"),
    [("exit 3", 3, "exit code 3; what it left cannot be read: "), ("kill -9 $$", 137, "killed by SIGKILL; what it left ")],
)
def test_an_end_that_cannot_be_examined_is_told(told: Told, monkeypatch: pytest.MonkeyPatch, script: str, code: int, summary: str) -> None:
    def examine(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "examine", examine)
    told.start(script)
    death = told.ends.get(timeout=60).death
    assert (death.code, death.summary.startswith(summary)) == (code, True), death


DEAF = "trap '' TERM; echo > $0; while :; do sleep 0.05; done"
"""Says that it runs, and ends by SIGKILL only."""


def out_of_threads(monkeypatch: pytest.MonkeyPatch, times: float) -> Callable[[], int]:
    """For whoever is to end workers; how often it was tried."""
    start, tries = threading.Thread.start, list[int]()

    def poor(thread: threading.Thread) -> None:
        if thread.name == "child-kill":
            tries.append(0)
            if len(tries) <= times:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", poor)
    return lambda: len(tries)


@pytest.mark.parametrize("times", [2, float("inf")], ids=["for a moment", "for good"])
def test_a_grace_period_ends_also_while_no_thread_can_be_had(
    told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: float
) -> None:
    """The loop, which may only lose its workers by that, comes back to it; none is ended before its time."""
    tried = out_of_threads(monkeypatch, times)
    told.start(DEAF.replace("$0", str(tmp_path / "runs")))
    until(lambda: (tmp_path / "runs").exists())
    began = time.monotonic()
    told.processes.kill(gently=True)
    until(lambda: told.processes.tend() or not told.ends.empty())
    assert time.monotonic() - began >= 1.0
    assert told.ends.get(timeout=60).death.signal == "SIGKILL"
    last = tried()
    assert last >= 3
    told.processes.tend()
    assert tried() == last, "nothing is left to do"


def until(reached: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)
