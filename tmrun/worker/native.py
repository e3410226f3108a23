"""Torch's own way to (re)initialise a communicator with new peers, from 2.14 on: ``Backend.reconfigure``.

Used to *initialise* a backend that was made for one migration: torch tears down before it connects, so reconfiguring the one in use would
stop training for as long as connecting takes. A backend in this mode connects nothing until then; it can be given up at any time.
Ranks are told by the order of the handles, which the members leave for each other in the store.
Tried with gloo's implementation of it. May not know: backends in particular, migrations.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d
from torch._C._distributed_c10d import Store

_FIRST = 1
"""Torch wants a number that this backend has not had; each backend is configured once."""


def connect(backend: Any, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Initialise with all peers. Raises RuntimeError when one does not come."""
    store.set(f"handle/{rank}", backend.get_reconfigure_handle())
    store.wait([f"handle/{peer}" for peer in range(size)], timeout)
    options: Any = c10d.ReconfigureOptions()  # type: ignore[attr-defined]
    options.uuid = _FIRST
    options.handles = [store.get(f"handle/{peer}").decode() for peer in range(size)]
    options.timeout = timeout
    backend.reconfigure(options).wait()
