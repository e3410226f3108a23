"""What can be learnt of a worker that has just ended: its error file, its last words, whether the kernel took it for memory.

May not know: the store, what follows.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tmrun.core.failure import is_echo
from tmrun.core.model import Failure, Host
from tmrun.core.node import Exited
from tmrun.core.policy import EXIT_DISK
from tmrun_agent.logs import WorkerOutput

_CGROUPS = Path("/sys/fs/cgroup")
_KILLED = 128 + signal.SIGKILL
_MOST = 1 << 16
"""Characters of an error that are told; a record of the store may be 1.5 MB."""


@dataclass(frozen=True, slots=True)
class Death:
    """``code`` as a shell shows it; ``summary`` is one line."""

    pid: int
    local_rank: int
    code: int
    time: float
    signal: str = ""
    """Name of the signal that ended it, if one did."""
    summary: str = ""
    message: str = ""
    traceback: str = ""
    tail: tuple[str, ...] = ()
    log: str = ""
    hint: str = ""
    out_of_memory: bool = False
    """The kernel says that it ended processes of ours for memory."""

    @property
    def echo(self) -> bool:
        """It says itself that it only lost a peer."""
        return is_echo(self.code, f"{self.message}\n{self.traceback}" if self.message else "", self.tail)


def examine(pid: int, local_rank: int, code: int, why: str, output: WorkerOutput, kills_before: int | None) -> Death:
    """``code`` as Popen gives it (negative for a signal), ``why`` its agent ended it, if it did that to this one alone; ``kills_before``:
    ``oom_kills()`` when the worker started."""
    now = time.time()
    if code == 0:
        return Death(pid, local_rank, 0, now)
    shell_code = _shell_code(code)
    kills = _more(kills_before, oom_kills())
    hint = "" if why else memory_hint(shell_code, kills) or disk_hint(shell_code)
    message, stack, when = read_error(output.error_file)
    how = _how(code)
    error = message.strip().partition("\n")[0]
    what = "; ".join(x for x in (hint, error) if x) if shell_code == EXIT_DISK else why or hint or error
    summary = f"{how}: {what}" if what else how
    no_memory = not why and shell_code == _KILLED and bool(kills)
    left = output.tail(), output.folder
    return Death(pid, local_rank, shell_code, when or now, _signal(code), summary, message, stack, *left, hint, no_memory)


def unexamined(pid: int, local_rank: int, code: int, error: Exception) -> Death:
    """What is certain all the same, when ``examine`` failed."""
    shell_code = _shell_code(code)
    return Death(pid, local_rank, shell_code, time.time(), _signal(code), f"{_how(code)}; what it left cannot be read: {error!r}")


def exited(death: Death, step: int) -> Exited:
    """As the node's rules are told of it; ``step``: in which it was, -1: nobody knows."""
    return Exited(death.pid, death.code, death.summary, step, death.out_of_memory, death.echo)


def failure(death: Death, host: Host, slot: int, rank: int, epoch: int) -> Failure:
    """As people are told of it."""
    return Failure(
        host, slot, rank, death.local_rank, death.pid, death.code, death.time, epoch, death.signal, death.message, death.traceback,
        death.tail, death.log, death.hint, death.echo,
    )  # fmt: skip


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _signal(code: int) -> str:
    return signal_name(-code) if code < 0 else ""


def _how(code: int) -> str:
    return f"killed by {_signal(code)}" if code < 0 else f"exit code {code}"


def signal_name(number: int) -> str:
    """9 -> SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_error(path: str) -> tuple[str, str, float]:
    """(message, traceback, when) of a file as ``torch.distributed.elastic.multiprocessing.errors.record`` writes it; empty when none.

    The time is the file's own: what is written in it is cut to whole seconds.
    """
    try:
        when = Path(path).stat().st_mtime if path else 0.0
        message: Any = json.loads(Path(path).read_text())["message"] if path else ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", "", 0.0
    if not isinstance(message, dict):
        return str(message)[:_MOST], "", when
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""  # a script may write the file itself
    return str(message.get("message", ""))[:_MOST], str(stack)[-_MOST:], when


def memory_hint(code: int, kills: int | None) -> str:
    """Why a SIGKILL that nobody of ours sent may have come. ``kills``: by the kernel in our cgroup, since the worker started; None: it is
    not told."""
    if code != _KILLED:
        return ""
    if kills is None:
        return "perhaps out of memory; `dmesg` on this host knows"
    if kills > 0:
        return "out of memory, says this host's cgroup; give the job more memory, or less to each worker"
    return "not by the kernel for memory, says this host's cgroup; somebody sent it"


def disk_hint(code: int) -> str:
    """What a worker that took part says with this code."""
    return "a disk of this host is full or fails" if code == EXIT_DISK else ""


def _more(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before


def oom_kills(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many processes the kernel has killed for memory in our cgroup (v2 or v1), or in the container's; None where it is not told."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in lines:
        files = {"": ("", "memory.events"), "memory": ("memory", "memory.oom_control")}.get(controllers)
        if files is None:
            continue
        for folder in (root / files[0] / path.lstrip("/"), root / files[0]):
            count = _counted(folder / files[1])
            if count is not None:
                return count
    return None


def _counted(path: Path) -> int | None:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
