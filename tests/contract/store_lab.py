"""What the contract tests share: one store under test with its own way of letting time pass, and etcds that can be hurt."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tmrun.store.api import Changed, Resync, Store, WatchEvent
from tmrun.store.embedded import command, find_binary
from tmrun.store.endpoints import TlsFiles
from tmrun.store.etcd import EtcdStore

T = TypeVar("T")


def real_pause() -> None:
    time.sleep(0.02)


def eventually(what: Callable[[], T], timeout_s: float = 20.0, pause: Callable[[], None] = real_pause) -> T:
    """Poll until truthy. The limit is real time, generous, and only there to end a failing test."""
    deadline = time.monotonic() + timeout_s
    while not (result := what()):
        assert time.monotonic() < deadline, "did not happen in time"
        pause()
    return result


@dataclass
class Lab:
    """A store, a prefix of its own, and time: virtual (each poll is a step) or real."""

    store: Store
    prefix: str
    pause: Callable[[], None]

    def key(self, name: str) -> str:
        return self.prefix + name

    def eventually(self, what: Callable[[], T]) -> T:
        return eventually(what, pause=self.pause)


@dataclass
class Seen:
    """A watch's receiver that remembers."""

    events: list[WatchEvent] = field(default_factory=list)

    def __call__(self, event: WatchEvent) -> None:
        self.events.append(event)

    @property
    def resyncs(self) -> list[Resync]:
        return [event for event in self.events if isinstance(event, Resync)]

    @property
    def changes(self) -> list[tuple[str, str | None]]:
        return [(e.key, e.value and e.value.value) for e in self.events if isinstance(e, Changed)]

    def fold(self) -> dict[str, str]:
        """The keys as a receiver would know them."""
        known: dict[str, str] = {}
        for event in tuple(self.events):
            if isinstance(event, Resync):
                known = {kv.key: kv.value for kv in event.listing.entries}
            elif event.value is None:
                known.pop(event.key, None)
            else:
                known[event.key] = event.value.value
        return known


class RawEtcd:
    """An unguarded etcd that can be killed and started again on the same port and data."""

    def __init__(self, folder: Path, client_port: int, peer_port: int, tls: TlsFiles | None = None) -> None:
        self._argv = command(find_binary(), folder / "data", "127.0.0.1", client_port, peer_port, tls)
        self._log = folder / "etcd.log"
        self.endpoint = f"127.0.0.1:{client_port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Frozen:
    """SIGSTOP a process for the length of a block."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        assert eventually(lambda: all(state == "T" for state in _threads(self._pid)))  # some run on for a moment, and answer

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGCONT)


def _threads(pid: int) -> list[str]:
    """The states of a process's threads."""
    return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]


def gone(pid: int) -> bool:
    """No such process, or a zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tmrun-")]


def admin(store: EtcdStore, method: Callable[[Any], Any], request: Any) -> Any:
    """A request of etcd that the store itself has no use for."""
    return store._channels.call(method, request)
