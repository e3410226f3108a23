"""The bootstrap runs a script as Python would, and never outlives its agent or its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ROOT
from fake_agent import FakeAgent

from tmrun import wire
from tmrun.worker.link import EXIT_FENCED


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    agent = FakeAgent(tmp_path / "s")
    yield agent
    agent.close()


def start(agent: FakeAgent, tmp_path: Path, text: str, *arguments: str, parent: int | None = None) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(text)
    environment = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT),
        wire.ENV_SOCKET: agent.path, wire.ENV_ROLE: "active", wire.ENV_EPOCH: "1", wire.ENV_GENERATION: "1",
        wire.ENV_PARENT: str(parent or os.getpid()),
    }  # fmt: skip
    command = [sys.executable, "-m", "tmrun.worker.bootstrap", *(arguments or ["script.py"])]
    return subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_exit_codes_and_output(agent: FakeAgent, tmp_path: Path) -> None:
    text = "import sys, atexit\natexit.register(print, 'bye')\nprint(__name__, sys.argv[1:], end='!')\nsys.exit(int(sys.argv[1]))"
    assert outcome(start(agent, tmp_path, text, "script.py", "7"))[:2] == (7, "__main__ ['7']!bye\n")
    assert outcome(start(agent, tmp_path, "raise SystemExit('reason')"))[::2] == (1, "reason\n")


def test_an_error_looks_as_if_python_had_run_the_script(agent: FakeAgent, tmp_path: Path) -> None:
    code, _, err = outcome(start(agent, tmp_path, "def f():\n    raise ValueError('mine')\nf()\n"))
    assert code == 1
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert "script.py" in err.splitlines()[1]
    assert err.splitlines()[-1] == "ValueError: mine"
    assert "runpy" not in err


def test_as_a_module(agent: FakeAgent, tmp_path: Path) -> None:
    assert outcome(start(agent, tmp_path, "print(__name__, __spec__.name)", "-m", "script"))[:2] == (0, "__main__ script\n")


def test_it_ends_with_its_agent(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path / "s")
    process = start(agent, tmp_path, "import time\ntime.sleep(60)")
    agent.wait(lambda: process.pid in agent.channels, 60, "connect")
    agent.close()
    code, _, err = outcome(process)
    assert code == EXIT_FENCED
    assert "closed the control channel" in err


def test_it_ends_with_its_parent(agent: FakeAgent, tmp_path: Path) -> None:
    assert outcome(start(agent, tmp_path, "print('ran')", parent=1))[:2] == (1, "")
    code = (
        "import subprocess, sys, os, time; os.environ['TMRUN_PARENT_PID'] = str(os.getpid());"
        "p = subprocess.Popen([sys.executable, '-m', 'tmrun.worker.bootstrap', 'script.py']); print(p.pid, flush=True); time.sleep(60)"
    )
    (tmp_path / "script.py").write_text("import time\ntime.sleep(60)")
    environment = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT),
        wire.ENV_SOCKET: agent.path, wire.ENV_ROLE: "active", wire.ENV_EPOCH: "1", wire.ENV_GENERATION: "1",
    }  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        agent.wait(lambda: child in agent.channels, 60, "connect")
        parent.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while _alive(child):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_steps_before_init_process_group(agent: FakeAgent, tmp_path: Path) -> None:
    code, _, err = outcome(start(agent, tmp_path, "import tmrun\nfor step in tmrun.join().steps(1): pass"))
    assert code == 1
    assert "call init_process_group first" in err


def test_another_rank_than_assigned(agent: FakeAgent, tmp_path: Path) -> None:
    script = "import torch.distributed as dist\ndist.init_process_group('gloo', rank=3, world_size=4)"
    code, _, err = outcome(start(agent, tmp_path, script))
    assert code == 1
    assert "init_process_group(rank=3) under tmrun, which assigned 0" in err
