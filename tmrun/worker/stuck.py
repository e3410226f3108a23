"""The last resort in a failure: a main thread that nothing wakes.

A gloo operation whose send met a closed connection is never told (``comm_gloo``), and without the C++ switch nobody can let go whoever
waits for it. Such a process would hold up all others until the operation's timeout, half an hour by default. It ends itself instead, and
its rank moves like that of any dead process. A main thread that works, or waits for less than ``STUCK_S``, is left alone; waiting for a
device may look like work.
May not know: steps, votes.
"""

from __future__ import annotations

import os
import threading
import time

from tmrun.worker.board import Pending
from tmrun.worker.comm_gloo import cpu_times
from tmrun.worker.link import fence
from tmrun.worker.process import Process

STUCK_S = float(os.environ.get("TMRUN_TEST_STUCK_S", "60"))
_LOOK_S = 0.5


def watch(process: Process, pending: Pending) -> None:
    """Until this failure reached the main thread, or is off."""
    threading.Thread(target=_watch, args=(process, pending), name="tmrun-stuck", daemon=True).start()


def _watch(process: Process, pending: Pending) -> None:
    main = threading.main_thread().native_id
    assert main is not None
    used, since = cpu_times([main]), time.monotonic()
    while not (pending.reached or pending.gone or pending.commit is not None):
        time.sleep(_LOOK_S)
        now = cpu_times([main])
        if (now != used or None in now) and not process.live.waits_for_device:
            used, since = now, time.monotonic()
        elif time.monotonic() - since > STUCK_S and process.board.failure is pending:
            fence(f"rank {process.rank} hangs in an operation that nothing can wake since a rank was lost")
