"""``python -m tmrun.worker.bootstrap [-m] script args...``: run a script as ``__main__`` in a process that tmrun can move.

In order: tie our life to our parent's, redirect a standby's output, connect to the agent, catch torch, run the script. A standby that is
needed as another rank than it rehearsed runs the script again in the same, warm interpreter.
May not know: anything about a script but how Python would run it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from tmrun import wire

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Be killed when the parent ends; end now if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    expected = os.environ.get(wire.ENV_PARENT)
    if expected and os.getppid() != int(expected):
        os._exit(1)


def main(arguments: list[str]) -> NoReturn:
    """Never returns: the process ends with the script's exit code."""
    die_with_parent()
    from tmrun.worker import intercept, runtime
    from tmrun.worker.current import HOLDER

    as_module = arguments[:1] == ["-m"]
    target, *rest = arguments[as_module:]
    process = HOLDER.runtime = runtime.from_environment()
    process.start()
    intercept.install(process)
    gc.freeze()  # what is imported by now stays: a collection between two runs of the script (half a second else) skips it
    while True:
        code, rank = _run(target, rest, as_module)
        if rank is None:
            _end(code)
        HOLDER.joined = False
        process.become(rank)
        gc.collect()


def _run(target: str, rest: list[str], as_module: bool) -> tuple[int, int | None]:
    """Exit code, and the rank as which to start again."""
    from tmrun.worker.process import SoftRestart

    sys.argv = [target, *rest]
    sys.path[0] = str(Path.cwd()) if as_module else str(Path(target).resolve().parent)
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SoftRestart as restart:
        return 0, restart.rank
    except SystemExit as leave:
        return _code_of(leave), None
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, None
    except BaseException as error:
        error.__traceback__ = _of_the_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1, None
    return 0, None


def _code_of(leave: SystemExit) -> int:
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    print(leave.code, file=sys.stderr)
    return 1


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of runpy and this module, as if Python had run the script itself."""
    own = (__file__, runpy.__file__)
    at = trace
    while at is not None and (at.tb_frame.f_code.co_filename in own or "runpy" in at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return at or trace


def _end(code: int) -> NoReturn:
    """Python's ordinary end, but without tearing down process groups, whose threads may still hold references into Python."""
    from tmrun.worker.output import flush

    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # joins the script's own threads
    atexit._run_exitfuncs()
    flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
