"""Outlives the launcher by a moment: when the launcher ends, however it ends, kill what it left and remove its runtime folder.

Run as ``python -S -E -m tmrun.sweeper FD MARKER FOLDER [SOCKET]``; FD is the read end of a pipe that only the launcher holds open. A
launcher that ends in order writes a byte first; after any other end whoever asks at SOCKET is told that all is gone (``witness``).
May not know: jobs, agents, stores.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from tmrun import procs, witness

_WHOLE_SCREEN = b"\x1b7\x1b[r\x1b8"
"""A launcher that was killed could not tell the terminal that all of its lines scroll again."""


def main(argv: list[str]) -> int:
    """Wait for the launcher's end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # only the pipe decides
    fd, marker, folder = int(argv[0]), argv[1], Path(argv[2])
    orderly = False
    while os.read(fd, 4096):
        orderly = True
    if os.isatty(2):
        os.write(2, _WHOLE_SCREEN)
    clean = procs.sweep(marker)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        pass  # another job is in it
    if clean and not orderly and len(argv) > 3:
        witness.testify(socket.socket(fileno=int(argv[3])), marker)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
