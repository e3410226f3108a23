"""Names of unix sockets that fit into the kernel's 107 bytes, however deep their folder is. May not know: who talks over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 107


@contextmanager
def address(path: str) -> Iterator[str]:
    """What to bind or connect to for the socket at ``path``; good within the block. Raises OSError: its folder cannot be opened."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # noqa: PTH120  # as the caller spells it
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"  # noqa: PTH119
    finally:
        os.close(folder)
