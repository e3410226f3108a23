"""Stands between an etcd and the process that wants it: ends etcd when that process ends, however it ends.

Run by path (``python -I -S guard.py FD REMOVE LOG -- argv...``), so it imports nothing but the standard library and starts
in milliseconds. FD is the read end of a pipe whose only write end the owner holds: its EOF is the owner's death or wish.
A second pipe, held open by the child alone, tells of the child's death. The guard prints the child's pid first and exits
with the child's code (128 + n for signal n).
May not know: tmrun, etcd.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time

TERM_WAIT_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the child until it or the owner ends."""
    owner, remove, log = int(arguments[0]), arguments[1], arguments[2]
    argv = arguments[arguments.index("--") + 1 :]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pipe alone decides
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        _become(argv, log, held)
    os.close(held)
    os.write(1, b"%d\n" % child)
    ready, _, _ = select.select([owner, alive], [], [])
    if alive in ready and owner not in ready:
        return _reap(child)  # the living owner wants to read the log, and removes what it likes
    code = _end(child, alive)
    if remove:
        shutil.rmtree(remove, ignore_errors=True)
    return code


def _become(argv: list[str], log: str, held: int) -> None:
    """In the child: dies with the guard, writes to the log, holds the second pipe, takes signals as usual."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.set_inheritable(held, True)
        os.execv(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _end(child: int, alive: int) -> int:
    os.kill(child, signal.SIGTERM)
    ended, _, _ = select.select([alive], [], [], TERM_WAIT_S)
    if not ended:
        os.kill(child, signal.SIGKILL)  # also what a stopped process needs
    return _reap(child)


def _reap(child: int) -> int:
    """The pipe may close a moment before the process is gone, and a grandchild might hold it longer."""
    deadline = time.monotonic() + 10 * TERM_WAIT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.005)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
