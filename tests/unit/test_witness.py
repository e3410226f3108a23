"""The sweeper's last word and the closed port: only true ones count, and silence says nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tmrun import procs, witness
from tmrun.witness import Proof


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with witness.listen() as found:
        yield found


def test_nobody_answers_while_the_launcher_lives(listener: socket.socket) -> None:
    assert witness.ask(witness.record("127.0.0.1", listener, "marker")) is Proof.NONE


def test_the_last_word(listener: socket.socket) -> None:
    thread = threading.Thread(target=witness.testify, args=(listener, "marker", 2.0))
    thread.start()
    assert witness.ask(witness.record("127.0.0.1", listener, "marker")) is Proof.WORD
    assert witness.ask(witness.record("127.0.0.1", listener, "of another launch")) is Proof.NONE
    thread.join()


@pytest.mark.parametrize("where", ["", "nonsense", "127.0.0.1:x/abc", "no-such-host.invalid:1/abc", "255.255.255.255:1/abc"])
def test_silence_proves_nothing(where: str) -> None:
    assert witness.ask(where) is Proof.NONE


def test_the_port_is_closed_when_the_last_that_holds_it_has_ended() -> None:
    """Like launcher, agent and worker: each inherits it from the one before, and they end in that order."""
    with witness.listen() as listener:
        asked = witness.record("localhost", listener, "marker")
        held = (listener.fileno(),)
        hold = (
            "import subprocess, sys\n"
            "subprocess.Popen(['sleep', '600'], pass_fds=[int(sys.argv[1])], stdout=2)\n"
            "print(flush=True)\n"
            "sys.stdin.read()"
        )
        agent = subprocess.Popen(
            [sys.executable, "-c", hold, str(held[0])], pass_fds=held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert agent.stdout is not None and agent.stdin is not None
        assert agent.stdout.readline()
        (worker,) = procs.children(agent.pid)
    assert witness.ask(asked) is Proof.NONE
    agent.kill()
    agent.communicate(timeout=20)
    assert witness.ask(asked) is Proof.NONE, "the worker lives"
    os.kill(worker, signal.SIGKILL)
    end = time.monotonic() + 20
    while witness.ask(asked) is not Proof.CLOSED:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("clean", [True, False])
def test_a_real_sweeper(tmp_path: Path, listener: socket.socket, clean: bool) -> None:
    """It kills what the launch left, then answers; after an orderly end it leaves at once."""
    marker = f"witness-{os.getpid()}-{clean}"
    folder = tmp_path / "job" / "run"
    folder.mkdir(parents=True)
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-S", "-E", "-m", "tmrun.sweeper", str(read_end), marker, str(folder), str(listener.fileno())]
    root = Path(procs.__file__).parent.parent
    with subprocess.Popen(argv, pass_fds=(read_end, listener.fileno()), cwd=root) as sweeper:
        os.close(read_end)
        victim = subprocess.Popen(["sleep", "600"], env={**os.environ, procs.ENV_MARKER: marker})
        if clean:
            os.write(write_end, b"clean")
        os.close(write_end)
        assert victim.wait(20) == -9
        if clean:
            assert sweeper.wait(20) == 0
        else:
            end = time.monotonic() + 20
            while witness.ask(witness.record("127.0.0.1", listener, marker)) is not Proof.WORD:
                assert time.monotonic() < end
                time.sleep(0.05)
            sweeper.kill()
