"""``python -m tmrun_agent.tcp_store FD ADDRESS PORT PARENT``: serve c10d's TCPStore on a listening socket until the parent ends.

May not know: the job.
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

from tmrun import procs


def main(argv: list[str]) -> None:
    """Never returns; the parent kills it."""
    fd, address, port, parent = int(argv[0]), argv[1], int(argv[2]), int(argv[3])
    procs.die_with_parent(parent)
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(address, port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=fd)
    while store:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
