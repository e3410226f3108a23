"""A rehearsal gives way, and takes its rank at the priority it came with."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import pytest
from trials import Trials

from tmrun import wire
from tmrun.worker import priority

_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(platform.machine())


def niceness(pid: int) -> tuple[int, int | None]:
    """Of its main thread: CPU's, and class of its I/O."""
    libc = ctypes.CDLL(None)
    return os.getpriority(os.PRIO_PROCESS, pid), libc.syscall(_IOPRIO_GET, 1, pid) >> 13 if _IOPRIO_GET is not None else None


def test_a_standby_gives_way_until_it_takes_a_rank(trials: Trials) -> None:
    """That of the CPU only where it may be raised again; that of its I/O always."""
    job = trials.make("ddp", TEST_PACE_S="0.1")
    joiner = job.standby(1)
    job.start()
    own, io = niceness(job.ranks[1].pid)
    lowered = own + priority._NICER if priority._can_return(own) else own
    assert niceness(joiner.pid) == (lowered, None if io is None else 3)
    job.reach(4)
    job.drain(1, joiner)
    job.expect(joiner, wire.Resumed, epoch=2)
    assert niceness(joiner.pid) == (own, io)


def test_all_threads_there_and_back() -> None:
    own, stop = os.getpriority(os.PRIO_PROCESS, 0), threading.Event()
    if not priority._can_return(own):
        pytest.skip("this process may not raise its priority again")
    thread = threading.Thread(target=stop.wait)
    thread.start()
    mine = priority.Priority()
    try:
        mine.lower()
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == own + priority._NICER
        mine.restore()
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == own == os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        mine.restore()
        stop.set()
        thread.join()


def test_who_cannot_return_does_not_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "_can_return", lambda nice: False)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    mine = priority.Priority()
    mine.lower()
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    mine.restore()
