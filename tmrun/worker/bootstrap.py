"""``python -u bootstrap.py [-m | --exec] target args...``: run a script as ``__main__``, as Python itself would, and end with our parent.

Started by its path, so that nothing of tmrun is imported: a script that never imports tmrun is left alone, torch and all. Its first
``import tmrun`` makes the process one that can move (``activate``). A standby is activated before its script; to rehearse another rank, or
when it is needed as one, it runs the script again in the same, warm interpreter.
``--exec`` becomes another program. An exception that ends the script is written to $TORCHELASTIC_ERROR_FILE, as ``@record`` would.
May not know: anything about a script but how Python would run it. Imports the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import io
import json
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_ENV_PARENT, _ENV_WORKER, _ENV_ROLE = "TMRUN_PARENT_PID", "TMRUN_WORKER_PID", "TMRUN_WORKER_ROLE"  # of ``wire``, which would import tmrun
_EXIT_DISK = 74  # of ``core.policy``


def die_with_parent() -> bool:
    """Be killed when the parent ends; end now if our agent already has. False: the agent is not the parent itself, but further up."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    expected = os.environ.get(_ENV_PARENT)
    if not expected or os.getppid() == int(expected):
        return True
    if int(expected) not in _ancestors():
        os._exit(1)
    return False


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[1])
        except OSError:
            return  # it ended: who started it cannot be told


def main(arguments: list[str]) -> None:
    """Does not return when the process was activated; else Python's ordinary end follows. Raises SystemExit."""
    is_the_worker = die_with_parent()
    run_on(os.environ.get("TMRUN_CPUS"))
    if arguments[:1] == ["--exec"]:
        become(arguments[1:])
    as_module = arguments[:1] == ["-m"]
    target, *rest = arguments[as_module:]
    began_in = _folder()
    if is_the_worker:
        os.environ[_ENV_WORKER] = str(os.getpid())  # what ``import tmrun`` looks for; not in children, which inherit all the rest
    else:
        _tell_of_the_wrapper()
    if os.environ.get(_ENV_ROLE) == "standby" or ("tmrun" in sys.modules and is_the_worker):
        from tmrun.worker.activate import activate

        activate()
    while True:
        code, rank = _run(target, rest, as_module)
        if _holder() is None:
            sys.exit(code)
        if rank is None:
            _end(code)
        _again(rank, began_in)


def become(command: list[str]) -> NoReturn:
    """Be this program from now on; the tie to the parent stays."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"tmrun: cannot execute {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(126 if isinstance(error, PermissionError) else 127)


def run_on(cpus: str | None) -> None:
    """Only on these CPUs (``0,1,2``), if any are told."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    except OSError as error:
        print(f"tmrun: --numa-binding: this worker cannot run on the CPUs {cpus} only: {error.strerror}", file=sys.stderr)


def _tell_of_the_wrapper() -> None:
    """Our agent started something that started us: it would talk to the other process, and signals go there too."""
    what = "$PYTHON_EXEC starts Python as a process below itself: `import tmrun` has no effect here, and signals may not reach the script"
    if os.environ.get(_ENV_ROLE) == "standby":
        sys.exit(f"tmrun: {what}; a standby needs `exec` in it")
    if os.environ.get("TMRUN_LOCAL_RANK", "0") == "0":
        print(f"tmrun: {what}; write `exec` before the interpreter in it", file=sys.stderr, flush=True)


def _holder() -> Any:
    """The global of an activated process, else None."""
    current = sys.modules.get("tmrun.worker.current")
    return current.HOLDER if current is not None and current.HOLDER.runtime is not None else None


def _folder() -> str:
    """Where this process is; empty if that was deleted, which Python does not mind."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _again(rank: int, began_in: str) -> None:
    """The script may have gone to another folder; its own path, and others on its command line, are relative to the first one."""
    with contextlib.suppress(OSError):  # it is gone, then or by now: whoever needs it says so
        os.chdir(began_in)
    if told := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # by the script's ``@record``, of a rehearsal: nobody is to take it for a rank's
        Path(told).unlink(missing_ok=True)
    holder = _holder()
    holder.joined = False
    holder.runtime.become(rank)
    gc.collect()


def _run(target: str, rest: list[str], as_module: bool) -> tuple[int, int | None]:
    """Exit code, and the rank as which to start again."""
    sys.argv = [target, *rest]
    code = 0
    try:
        _as_module(target) if as_module else _as_script(target)
    except SystemExit as leave:
        code = _code_of(leave)
    except BaseException as error:
        if (rank := getattr(error, "tmrun_restart_as", None)) is not None:
            return 0, rank
        if not isinstance(error, KeyboardInterrupt) and (rank := _way_back()) is not None:
            sys.excepthook(type(error), error, error.__traceback__)
            return 0, rank
        error.__traceback__ = _of_the_script(error.__traceback__)
        _record(error)
        sys.excepthook(type(error), error, error.__traceback__)
        _explain(error)
        return _code_for(error), None
    return code, _way_back() if code <= 128 else None  # more: a signal, by a handler of the script


def _way_back() -> int | None:
    """The rank as which a standby runs the script again that rehearsed another role and came to its end."""
    holder = _holder()
    return holder.runtime.way_back() if holder is not None else None


def _code_for(error: BaseException) -> int:
    """As Python, but for a process that takes part: what its machine did to it is told apart from what the program did."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    holder = _holder()
    if holder is not None and holder.joined and _disk_is_to_blame(error):
        return _EXIT_DISK
    return 1


def _disk_is_to_blame(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _explain(error: BaseException) -> None:
    """What to change, if tmrun knows."""
    holder = _holder()
    if holder is not None and (hint := holder.runtime.explain(error)):
        print(f"tmrun: {hint}", file=sys.stderr, flush=True)


def _as_module(name: str) -> None:
    sys.path[0] = _folder()
    _fresh_main()
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]  # what ``python -m`` itself calls


def _as_script(target: str) -> None:
    path = os.path.abspath(target)  # noqa: PTH100  # as Python: symbolic links stay
    module = _fresh_main()
    if _has_main_inside(path):
        sys.path[0] = path
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    sys.path[0] = str(Path(target).resolve().parent)
    runpy._run_code(_compiled(path), module.__dict__, None, "__main__", None, None, path)  # type: ignore[attr-defined]


def _fresh_main() -> types.ModuleType:
    """A ``__main__`` for the script; ours keeps its own namespace."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    return module


def _has_main_inside(path: str) -> bool:
    """A folder or a zip file with a ``__main__.py``."""
    if path.endswith((".py", ".pyc")):
        return False
    if Path(path).is_dir():
        return True
    import zipfile

    return zipfile.is_zipfile(path)


def _compiled(path: str) -> Any:
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    return code


def _record(error: BaseException) -> None:
    """Leave the error where torchrun's tools look for it, unless the script's ``@record`` already has."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not isinstance(error, Exception) or Path(path).exists():
        return
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}))


def _code_of(leave: SystemExit) -> int:
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    print(leave.code, file=sys.stderr)
    return 1


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of runpy and this module, as if Python had run the script itself."""
    at = trace
    while at is not None and (at.tb_frame.f_code.co_filename == __file__ or "runpy" in at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return at


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
