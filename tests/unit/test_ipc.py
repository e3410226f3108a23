"""Workers reach their agent wherever its socket is, and whatever it ran out of for a moment."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
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
