"""Values of any size in the job's store: etcd takes requests of 1.5 MiB. Whole or not there; nothing is unpickled.

May not know: what they are.
"""

from __future__ import annotations

import zlib
from typing import Any

from tmrun.worker import values
from tmrun.worker.agent_store import AgentStore

_CHUNK = 512 << 10
"""Base64 adds a third."""


def pack(value: Any, level: int = -1) -> bytes:
    """A plain value, compressed."""
    return zlib.compress(values.encode(value), level)


def put(store: AgentStore, key: str, body: bytes) -> None:
    """Write what ``pack`` gave; that it is complete is written last."""
    chunks = [body[i : i + _CHUNK] for i in range(0, len(body), _CHUNK)]
    for number, chunk in enumerate(chunks):
        store.set(f"{key}/{number}", chunk)
    store.set(complete(key), str(len(chunks)))


def complete(key: str) -> str:
    """The key that is there once the whole value is."""
    return f"{key}/chunks"


def get(store: AgentStore, key: str, most: int) -> Any:
    """Read a complete value, of at most ``most`` bytes unpacked, whoever wrote it. Raises WorkerError, zlib.error when it is none."""
    body = b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(complete(key)))))
    return values.decode(zlib.decompressobj().decompress(body, most))
