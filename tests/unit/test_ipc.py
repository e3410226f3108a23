"""Workers reach their agent wherever its socket is, and whatever it ran out of for a moment."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tmrun_agent.ipc import WorkerSaid, WorkerServer

from tmrun import wire
from tmrun.worker.link import connect

Said = queue.SimpleQueue[WorkerSaid]


def answer(_: wire.StoreRequest) -> wire.StoreReply:
    raise AssertionError("nobody asks")


@pytest.fixture
def said() -> Said:
    return queue.SimpleQueue()


@pytest.fixture
def server(tmp_path: Path, said: Said) -> Iterator[WorkerServer]:
    """In a folder whose name alone is longer than a socket's may be; an earlier agent left its own there."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    (folder / "node0.sock").touch()
    server = WorkerServer(folder / "node0.sock", said.put, answer)
    yield server
    server.close()


def test_a_long_name(server: WorkerServer, said: Said, tmp_path: Path) -> None:
    with connect(f"{tmp_path}/{'long' * 30}/node0.sock", wire.Channel.CONTROL, 3):
        assert said.get(timeout=60).local_rank == 3
    (left,) = (tmp_path / ("long" * 30)).iterdir()
    assert left.is_socket()


def test_out_of_descriptors_for_a_moment(server: WorkerServer, said: Said, tmp_path: Path) -> None:
    listener, refusals = server._listener, iter(range(2))

    class Poor:
        def accept(self) -> tuple[socket.socket, object]:
            if next(refusals, None) is not None:
                raise OSError(24, "Too many open files")
            return listener.accept()

    server._listener = Poor()  # type: ignore[assignment]
    for local_rank in range(2):  # the first one is still accepted by the call that waits
        with connect(f"{tmp_path}/{'long' * 30}/node0.sock", wire.Channel.CONTROL, local_rank):
            assert said.get(timeout=60).local_rank == local_rank
    assert next(refusals, None) is None
    server._listener = listener


def test_out_of_threads_for_a_moment(server: WorkerServer, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that was accepted just then is served later: its worker does not try again."""
    start, refusals = threading.Thread.start, iter(range(2))

    def poor(thread: threading.Thread) -> None:
        if next(refusals, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", poor)
    with connect(f"{tmp_path}/{'long' * 30}/node0.sock", wire.Channel.CONTROL, 3):
        assert said.get(timeout=60).local_rank == 3
    assert next(refusals, None) is None


def test_a_connection_that_nobody_could_serve_is_closed_at_the_end(
    server: WorkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def none(_: threading.Thread) -> None:
        tried.set()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    with connect(f"{tmp_path}/{'long' * 30}/node0.sock", wire.Channel.CONTROL, 3) as sock:
        assert tried.wait(60)
        server.close()
        sock.settimeout(60)
        with suppress(ConnectionResetError):  # what it sent was never read
            assert sock.recv(1) == b""
