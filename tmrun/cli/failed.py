"""The report of a failed job: the cause in full, the other failures in one line each; what torchrun prints, for all nodes, and more.

May not know: which failures count, which is the cause (``core.failure``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tmrun.core import codec
from tmrun.core.failure import end_file, error_file, root_cause, unanswered
from tmrun.core.membership import Job
from tmrun.core.model import End, Failure
from tmrun.core.plural import many
from tmrun.store.api import Store

_WIDTH = 60


def read(store: Store, job: Job) -> list[Failure]:
    """What agents told of workers' ends that nothing has healed. Raises StoreError."""
    return unanswered([codec.decode(Failure, kv.value) for kv in store.list(job.keys.failures).entries], job.maps)


def leave_error_file(failures: Sequence[Failure], end: End, path: str) -> None:
    """The cause, for whoever started the launcher and reads $TORCHELASTIC_ERROR_FILE, as torchrun leaves it. Raises OSError.

    ``end`` is what is told when no worker's failure is: also of a launch that ended by an error of its own."""
    Path(path).write_text(json.dumps(error_file(root_cause(failures)) if failures else end_file(end, time.time())))


def report(title: str, failures: Sequence[Failure], restarts: int) -> str:
    """Text of several lines: the cause in full, the others in one line each. ``restarts`` that the job had."""
    root = root_cause(failures)
    others = sorted((f for f in failures if f is not root), key=lambda f: f.time)
    again = f", after {many(restarts, 'restart')}" if restarts else ""
    lines = ["=" * _WIDTH, f"{title} FAILED{again}", "-" * _WIDTH, "Root cause (first observed failure):", *_block(root)]
    if others:
        lines += ["-" * _WIDTH, f"Other failures ({len(others)}):", *(_line(f) for f in others)]
    return "\n".join([*lines, "=" * _WIDTH])


def _block(failure: Failure) -> list[str]:
    facts = {
        "time": _clock(failure.time),
        "host": failure.host,
        "rank": f"{failure.rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{failure.exit_code} (pid: {failure.pid}){_signal(failure)}",
        "hint": failure.hint,
        "error": failure.message,
        "logs": failure.log,
    }
    lines = [f"  {name:<9} : {_indented(value)}" for name, value in facts.items() if value]
    words = failure.traceback.splitlines() or list(failure.tail)
    if words:
        lines.append(f"  {'traceback' if failure.traceback else 'stderr'} :")
        lines += [f"    {word}" for word in words]
    return lines


def _indented(text: str) -> str:
    """A text of several lines below its first."""
    return "\n".join([line if i == 0 else f"    {line}" for i, line in enumerate(text.strip().splitlines())])


def _line(failure: Failure) -> str:
    what = failure.message.strip().partition("\n")[0] or failure.hint or (failure.tail[-1] if failure.tail else "")
    return (
        f"  {_clock(failure.time)} {failure.host} rank {failure.rank} (local_rank: {failure.local_rank}): "
        f"exitcode {failure.exit_code}{_signal(failure)}{': ' + what if what else ''}"
    )


def _signal(failure: Failure) -> str:
    return f" {failure.signal}" if failure.signal else ""


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="milliseconds")
