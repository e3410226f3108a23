"""torch's file timer: torch's own client on one side of the pipe, ours on the other."""

from __future__ import annotations

import os
import queue
import signal
import time
from pathlib import Path

import pytest
from tmrun_agent.timers import FileTimers, Request, expired, fold, from_environment, parse
from torch.distributed.elastic.timer import FileTimerClient

NOW = 1000.0


def timer(pid: int, scope: str, expires: float, number: int = signal.SIGKILL) -> Request:
    return Request(pid, scope, expires, number)


def test_only_what_ran_out_and_was_not_left() -> None:
    timers: dict[tuple[int, str], Request] = {}
    for request in (
        timer(1, "late", NOW - 1),
        timer(1, "later", NOW - 5),
        timer(2, "left", NOW - 1),
        timer(2, "left", -1),
        timer(3, "has time", NOW + 1),
        timer(4, "only told of", NOW - 1, 0),
    ):
        timers = fold(timers, request)
    assert {pid: found.scope for pid, found in expired(timers, NOW).items()} == {1: "later"}


@pytest.mark.parametrize("line", ["", "{}", "[]", "7", '{"pid": "x"}', "nonsense"])
def test_what_is_no_request(line: str) -> None:
    assert parse(line) is None


def test_torchs_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.Queue[tuple[int, int, str]] = queue.Queue()
    path, waits = tmp_path / "pipe", {os.getpid()}
    path.touch()  # left by an agent that was killed
    assert from_environment(path, lambda *end: ended.put(end), waits.__contains__) is None, "nobody asked for it"
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    timers = from_environment(path, lambda *end: ended.put(end), waits.__contains__)
    assert isinstance(timers, FileTimers)
    client = FileTimerClient(str(path), signal.SIGTERM)
    client.acquire("left in time", time.time() + 1)
    client.release("left in time")
    client.acquire("backward", time.time() + 1)
    with pytest.raises(queue.Empty):
        ended.get(timeout=3)  # a worker that tmrun lets wait has no less time for it
    waits.clear()
    pid, number, why = ended.get(timeout=60)
    assert (pid, number) == (os.getpid(), signal.SIGTERM)
    assert why.startswith("its timer 'backward' ran out")
