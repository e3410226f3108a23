"""A rehearsal gives way, and takes its rank at the priority it came with."""

from __future__ import annotations

import os
import threading

import pytest

from tmrun.worker import priority


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
