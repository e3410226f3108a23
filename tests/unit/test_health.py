"""A real worker process that gets stuck, watched from outside: frozen, with its GIL held, in an endless loop."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tmrun_agent.health import Health, Noticed, innermost, process_state

from tmrun.beacon import ENV_BEACON, Beacon
from tmrun.core.model import Evidence
from tmrun.core.watchdog import Limits

CHILD = """
import ctypes, os, sys, time
from tmrun.core.watchdog import Place
from tmrun.worker import pulse

def stuck_in_a_loop():
    while True:
        time.sleep(0.01)

mine = pulse.from_environment()
mine.start(os.environ["TMRUN_BEACON"])
for step in range(6):
    mine.begin(1, step, (), 2)
    with mine.voting():
        time.sleep(0.01)
    mine.done(())
print("ready", flush=True)
if sys.argv[1] == "over":
    mine.at(Place.DONE)
if sys.argv[1] == "gil":
    ctypes.PyDLL(None).pause()
stuck_in_a_loop()
"""
LIMITS = Limits(stopped_s=0.5, mute_s=1.0, late_s=2.0, between_s=2.0, left_s=0.5, steps=1.0, unsettled=1.0)


@pytest.fixture
def health(tmp_path: Path) -> Iterator[tuple[Health, queue.Queue[Noticed]]]:
    heard: queue.Queue[Noticed] = queue.Queue()
    yield Health(tmp_path, "node0", LIMITS, heard.put), heard


def start(health: Health, kind: str) -> subprocess.Popen[str]:
    env = {**os.environ, ENV_BEACON: str(health.prepare(0))}
    child = subprocess.Popen([sys.executable, "-c", CHILD, kind], env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    health.follow([child.pid])
    health.start()
    return child


@pytest.mark.parametrize(
    ("kind", "evidence"), [("gil", Evidence.MUTE), ("loop", Evidence.LATE), ("stop", Evidence.STOPPED), ("over", Evidence.LEFT)]
)
def test_a_stuck_worker_is_noticed(
    health: tuple[Health, queue.Queue[Noticed]], kind: str, evidence: Evidence, capfd: pytest.CaptureFixture[str]
) -> None:
    watcher, heard = health
    with start(watcher, kind) as child:
        try:
            if kind == "stop":
                os.kill(child.pid, signal.SIGSTOP)
            (sign,) = heard.get(timeout=60).signs
            told = capfd.readouterr().err
            assert (sign.rank, sign.step, sign.evidence) == (0, 5, evidence)
            assert watcher.step_of(child.pid) == 5
            if kind == "stop":
                assert "the kernel says: state T" in told
                os.kill(child.pid, signal.SIGCONT)
                while heard.get(timeout=60).signs:
                    pass  # told again from time to time; none: it moves again
            elif kind == "over":
                assert "most recent call first" not in told, "it may save for long: no stacks in the log"
            else:
                assert "most recent call first" in told
                assert sign.where.endswith("in stuck_in_a_loop" if kind == "loop" else "in <module>"), sign
        finally:
            child.kill()


def test_the_innermost_line_of_the_script() -> None:
    stacks = [
        "Thread 0x1 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 5 in wait',
        "Current thread 0x2 (most recent call first):",
        '  File "/v/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward',
        '  File "/home/me/train.py", line 41 in step',
        '  File "/home/me/train.py", line 99 in <module>',
    ]
    assert innermost(stacks) == "train.py:41 in step"
    assert innermost(stacks[:2]) == ""
    assert innermost([]) == ""


def test_the_kernels_letter() -> None:
    assert process_state(os.getpid()) in "RS"
    assert process_state(1 << 22) == "X"


def test_a_beacon_has_its_room_on_the_disk(tmp_path: Path) -> None:
    """Else the first write kills whoever writes, where the disk is full by then."""
    beacon = Beacon.create(tmp_path / "beacon")
    assert (tmp_path / "beacon").stat().st_blocks > 0
    beacon.set("ticks", 7)
    assert Beacon.attach(str(tmp_path / "beacon")).get("ticks") == 7
