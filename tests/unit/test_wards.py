"""A launcher's wards are real processes: one ends, one is frozen."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from tmrun import procs
from tmrun.cli.wards import Wards

AGENT = """
import subprocess, sys, time
from tmrun.beacon import Beacon
mine = Beacon.attach(sys.argv[1])
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
while True:
    mine.add("ticks")
    time.sleep(0.02)
"""
VARIABLE = "TMRUN_TEST_WARD"


@pytest.fixture
def told() -> queue.Queue[str]:
    return queue.Queue()


def test_an_end_is_noticed_and_a_frozen_agent_is_ended_with_its_workers(tmp_path: Path, told: queue.Queue[str]) -> None:
    marker, ended = uuid.uuid4().hex, threading.Event()
    wards = Wards(1.0, marker, VARIABLE, ended.set, told.put)
    env = {**os.environ, VARIABLE: f"{marker}/node0"}
    beacon = tmp_path / "node0.agent.beacon"
    agent = wards.watch("node0", [sys.executable, "-c", AGENT, str(beacon)], env, beacon)
    wards.start()
    assert not wards.beats("node0") and not wards.beats("node1"), "a signal would end it now"
    try:
        deadline = time.monotonic() + 60
        while len(procs.marked(f"{marker}/node0", VARIABLE)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.5)
        assert told.empty() and agent.poll() is None, "an agent that beats is left alone"
        assert wards.beats("node0")
        os.kill(agent.pid, signal.SIGSTOP)
        assert "agent node0 is frozen" in told.get(timeout=60)
        assert ended.wait(60)
        while procs.marked(f"{marker}/node0", VARIABLE):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert agent.returncode == -signal.SIGKILL
    finally:
        procs.sweep(f"{marker}/node0", VARIABLE)
