"""The end of each worker is told, whatever it left behind and whatever this host ran out of."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator

import pytest
from tmrun_agent import processes as module
from tmrun_agent.logs import WorkerOutput
from tmrun_agent.processes import Ended, Processes, Worker


class Told:
    """Processes, and what they told."""

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
