"""The sweeper's last word: only the true one counts, and silence says nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tmrun import procs, witness


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with witness.listen() as found:
        yield found


def test_nobody_answers_while_the_launcher_lives(listener: socket.socket) -> None:
    assert not witness.swept(witness.record("127.0.0.1", listener, "marker"))


def test_the_last_word(listener: socket.socket) -> None:
    thread = threading.Thread(target=witness.testify, args=(listener, "marker", 2.0))
    thread.start()
    assert witness.swept(witness.record("127.0.0.1", listener, "marker"))
    assert not witness.swept(witness.record("127.0.0.1", listener, "of another launch"))
    thread.join()


@pytest.mark.parametrize("where", ["", "nonsense", "127.0.0.1:1/abc", "127.0.0.1:x/abc"])
def test_silence_proves_nothing(where: str) -> None:
    assert not witness.swept(where)


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
            while not witness.swept(witness.record("127.0.0.1", listener, marker)):
                assert time.monotonic() < end
                time.sleep(0.05)
            sweeper.kill()
