"""What is behind MASTER_ADDR:MASTER_PORT: a TCPStore, served by the agent that has slot 0, for scripts that bring their own rendezvous.

The agent holds a few ports from its start, so that everybody knows them before any worker starts, and uses the next one after each
restart of the job: a worker that is not dead yet must not find the store of its successors. The store itself is a process with torch
in it, started at the first connection; it survives workers and ends with the agent. May not know: slots, what the store is used for.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tmrun_agent.autopsy import signal_name

PORTS = 8
_BACKLOG = 1024
_LOOK_S = 0.5


@dataclass
class MasterStore:
    """Ports of this host for the job's TCPStores. ``wanted``: the first one's number, 0: any free ones."""

    address: str
    wanted: int
    tell: Callable[[str], None]
    """An event for people."""
    _bound: list[socket.socket] = field(default_factory=list)
    _start: int = -1
    _serving: _Serving | None = None

    def __post_init__(self) -> None:
        first = _bind(self.address, self.wanted) if self.wanted else None
        self._bound = [first] if first else [_bind(self.address, 0) for _ in range(PORTS)]

    @property
    def ports(self) -> tuple[int, ...]:
        """In the order of their use, over and over."""
        return tuple(int(s.getsockname()[1]) for s in self._bound)

    def open(self, port: int, start: int) -> None:
        """Serve an empty store on one of the ports for this start of the workers, and no other any more. Raises OSError, RuntimeError."""
        if start == self._start:
            return
        self._end()
        listener = next(s for s in self._bound if s.getsockname()[1] == port)
        listener.listen(_BACKLOG)
        self._serving = _Serving(listener, self.address, self.tell)
        if self.wanted and port != self.wanted and self._start < 0:
            self.tell(f"--master-port {self.wanted} cannot be had at {self.address} (is it taken?): MASTER_PORT is {port}")
        self._start = start

    def _end(self) -> None:
        if self._serving is not None:
            self._serving.end()
        self._serving = None

    def close(self) -> None:
        """Give everything back."""
        self._end()
        for bound in self._bound:
            bound.close()


class _Serving:
    """One store. Its thread lives as long as the process it starts: the kernel ends a child with the *thread* that is its parent."""

    def __init__(self, listener: socket.socket, address: str, tell: Callable[[str], None]) -> None:
        self._listener, self._address, self._tell, self._wake = listener, address, tell, os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="master-port", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._wake)
            raise

    def end(self) -> None:
        """The store is gone when this returns."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        ready, _, _ = select.select([self._listener.fileno(), self._wake], [], [])
        if self._wake in ready:
            return
        fd, port = self._listener.fileno(), self._listener.getsockname()[1]
        argv = [sys.executable, "-m", "tmrun_agent.tcp_store", str(fd), self._address, str(port), str(os.getpid())]
        try:
            with subprocess.Popen(argv, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True) as server:
                how = self._watch(server)
        except OSError as error:
            how = f"cannot be started: {error}"
        if how:
            self._tell(f"the job's TCPStore (MASTER_ADDR:MASTER_PORT, {self._address}:{port}) {how}; whatever needs it from now on fails")
            self._refuse()

    def _watch(self, server: subprocess.Popen[bytes]) -> str:
        """Until it is not wanted any more, or (then it returns how) ends by itself."""
        while (code := server.poll()) is None:
            wanted, _, _ = select.select([self._wake], [], [], _LOOK_S)
            if wanted:
                server.kill()
                return ""
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def _refuse(self) -> None:
        """Our copy of the socket goes on listening: whoever connects must not wait for an answer that never comes."""
        while True:
            ready, _, _ = select.select([self._listener.fileno(), self._wake], [], [])
            if self._wake in ready:
                return
            with suppress(OSError):
                self._listener.accept()[0].close()


def _bind(address: str, port: int) -> socket.socket:
    """A bound socket; where the port or the address cannot be had, any port, on any address."""
    family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    for target in (where, (address, 0), ("", 0)):
        bound = socket.socket(family, socket.SOCK_STREAM)
        if port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(target)
            if port:
                bound.listen(_BACKLOG)  # while nobody listens, others with SO_REUSEADDR can bind it too
            return bound
        except OSError:
            bound.close()
    raise AssertionError(f"no port at all can be bound for {address}")
