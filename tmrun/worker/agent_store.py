"""c10d stores: the job's store as the agent serves it, and a store that can change what it stands for.

``AgentStore`` is one client with one connection; calls on it are serialised, so every thread that may block needs its own.
``SwitchStore`` lets a standby start on a private HashStore and land on the job's store without c10d noticing.
May not know: groups, migrations.

C++ finds overrides by name; newer and older spellings of the same operation are both given.
"""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tmrun import wire
from tmrun.core.errors import WireError, WorkerError
from tmrun.worker import link

_TIMEOUT_S = 300.0


class AgentStore(Store):
    """The job's key-value store; blocking calls end with an error when ``close`` is called from another thread."""

    def __init__(self, path: str, local_rank: int) -> None:
        super().__init__()
        self._socket: socket.socket = link.connect(path, wire.Channel.STORE, local_rank)
        self._origin = (path, local_rank)
        self._lock = threading.Lock()
        self._timeout_s = _TIMEOUT_S

    def close(self) -> None:
        """Make this client unusable; wakes a thread that waits in it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def dispose(self) -> None:
        """Give the descriptor back; only once no thread can be inside a call."""
        self.close()
        with self._lock:
            self._socket.close()

    def clone(self) -> AgentStore:
        """A client with its own connection."""
        return AgentStore(*self._origin)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._call(wire.StoreOp.SET, [key], value=value)

    def get(self, key: str) -> bytes:
        """Read a key; waits until it exists."""
        return base64.b64decode(self._call(wire.StoreOp.GET, [key]).value)

    def add(self, key: str, value: int) -> int:
        """Atomically add to a counter; returns the new count."""
        return self._call(wire.StoreOp.ADD, [key], amount=value).number

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return self._call(wire.StoreOp.CHECK, keys).found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys exist."""
        self._call(wire.StoreOp.WAIT, keys, timeout_s=timeout.total_seconds() if timeout else self._timeout_s)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write if the key holds the expected value; returns what it holds now."""
        return base64.b64decode(self._call(wire.StoreOp.COMPARE_SET, [key], value=desired_value, expected=expected_value).value)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._call(wire.StoreOp.DELETE, [key]).found

    def set_timeout(self, timeout: timedelta) -> None:
        """How long get and wait block by default."""
        self._timeout_s = timeout.total_seconds()

    def num_keys(self) -> int:
        """Not offered: keys of all jobs and groups live in one space."""
        raise WorkerError("the job's store cannot count its keys")

    def has_extended_api(self) -> bool:
        """No append or multi-key calls; c10d then does without."""
        return False

    def _call(
        self, op: wire.StoreOp, keys: Sequence[str], value: str | bytes = "", expected: str | bytes = "", amount: int = 0,
        timeout_s: float | None = None,
    ) -> wire.StoreReply:  # fmt: skip
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        request = wire.StoreRequest(op, tuple(keys), _text(value), _text(expected), amount, timeout_s)
        try:
            with self._lock:
                wire.send(self._socket, request)
                reply = wire.receive(self._socket)
        except OSError as error:
            raise dist.DistNetworkError(f"the agent's store is closed: {error}") from None
        if reply is None:
            raise dist.DistNetworkError("the agent's store is closed")
        if not isinstance(reply, wire.StoreReply):
            raise WireError(f"expected a store reply, got {reply}")
        if reply.error:
            raise dist.DistStoreError(f"store {op.value} of {', '.join(keys)} after {timeout_s:g} s: {reply.error}")
        return reply

    deleteKey = delete_key
    getNumKeys = num_keys
    hasExtendedApi = has_extended_api
    setTimeout = set_timeout


class SwitchStore(Store):
    """Forwards to ``inner``, which may be exchanged between two calls."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: str | bytes) -> None:
        """Forwarded."""
        self.inner.set(key, cast("str", value))  # bytes are as good, the annotation is too narrow

    def get(self, key: str) -> bytes:
        """Forwarded."""
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        """Forwarded."""
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Forwarded."""
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Forwarded."""
        if timeout is None:
            self.inner.wait(keys)
        else:
            self.inner.wait(keys, timeout)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Forwarded."""
        return self.inner.compare_set(key, cast("str", expected_value), cast("str", desired_value))

    def delete_key(self, key: str) -> bool:
        """Forwarded."""
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        """Forwarded."""
        return int(self.inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        """Forwarded."""
        self.inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """The job's store has none."""
        return False

    deleteKey = delete_key
    getNumKeys = num_keys
    hasExtendedApi = has_extended_api
    setTimeout = set_timeout


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
