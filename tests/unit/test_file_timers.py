"""torch's file timer: torch's own client on one side of the pipe, ours on the other."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tmrun_agent.logs import WorkerOutput
from tmrun_agent.processes import Ended, Processes, Worker
from tmrun_agent.timers import FileTimers, Request, Timer, expired, from_environment, parse
from torch.distributed.elastic.timer import FileTimerClient

NOW = 1000.0


def timer(worker: int, scope: str, expires: float, number: int = signal.SIGKILL) -> dict[tuple[int, str], Timer]:
    return {(worker, scope): Timer(Request(worker, scope, expires, number), worker, 0)}


def test_only_what_ran_out_and_names_a_signal() -> None:
    late = timer(1, "late", NOW - 1) | timer(1, "later", NOW - 5) | timer(3, "has time", NOW + 1) | timer(4, "only told of", NOW - 1, 0)
    assert {pid: found.request.scope for pid, found in expired(late, NOW).items()} == {1: "later"}


@pytest.mark.parametrize("line", ["", "{}", "[]", "7", '{"pid": "x"}', "nonsense"])
def test_what_is_no_request(line: str) -> None:
    assert parse(line) is None


def test_torchs_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.Queue[tuple[int, int, str]] = queue.Queue()
    path, waits = tmp_path / "pipe", {os.getpid()}
    path.touch()  # left by an agent that was killed
    hooks = (lambda *end: ended.put(end), waits.__contains__, lambda pid: pid)
    assert from_environment(path, *hooks) is None, "nobody asked for it"
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    timers = from_environment(path, *hooks)
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


HELPER = """
import json, os, sys, time
if os.fork():
    time.sleep(600)
for scope, expires in json.loads(sys.argv[2]).items():
    with open(sys.argv[1], "w") as pipe:
        pipe.write(json.dumps({"version": 1, "pid": os.getpid(), "scope_id": scope, "expiration_time": expires, "signal": 9}) + "\\n")
time.sleep(float(sys.argv[3]))
"""
"""A worker, and a process of its own, as a DataLoader has, that sets timers and lives for so long."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[dict[str, float], float], tuple[FileTimers, Processes, int]]]:
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
    processes = Processes(ended.put, 1.0)
    processes.told = ended  # type: ignore[attr-defined]

    def start(wanted: dict[str, float], lives_s: float) -> tuple[FileTimers, Processes, int]:
        timers = FileTimers(tmp_path / "pipe", processes.signal_one, lambda pid: False, processes.worker_of)
        timers.start()
        argv = (sys.executable, "-c", HELPER, str(timers.path), json.dumps(wanted), str(lives_s))
        (pid,) = processes.spawn([Worker(argv, os.environ, WorkerOutput("", ""))])
        return timers, processes, pid

    yield start
    processes.close()


def until(reached: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_timer_of_a_process_that_a_worker_started_ends_that_worker(started: Any) -> None:
    """torch's server takes any pid, and ends everything."""
    _, processes, pid = started({"fetch": 1.0}, 600)
    death = processes.told.get(timeout=60).death
    assert (death.pid, death.signal, death.out_of_memory) == (pid, "SIGKILL", False)
    assert re.match(r"killed by SIGKILL: the timer 'fetch' of its process \d+ ran out", death.summary), death.summary


def test_who_has_ended_is_late_for_nothing(started: Any) -> None:
    """Its number may be another process's by then."""
    late = time.time() + 3
    timers, processes, _ = started({"a": late, "b": late + 3600}, 0.5)
    until(lambda: len(timers._timers) == 2)
    until(lambda: not timers._timers or time.time() > late)
    assert time.time() < late
    with pytest.raises(queue.Empty):
        processes.told.get(timeout=late - time.time() + 1)


def test_a_stranger_ends_nobody(started: Any) -> None:
    timers, processes, pid = started({}, 600)
    with timers.path.open("w") as pipe:
        pipe.write(json.dumps({"pid": os.getppid(), "scope_id": "s", "expiration_time": 1.0, "signal": 9}) + "\n")
    with pytest.raises(queue.Empty):
        processes.told.get(timeout=1)
    assert processes.worker_of(pid) == pid
    assert processes.worker_of(os.getpid()) is None
