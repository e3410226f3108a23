"""Which of many failures was the cause.

A worker that loses a peer fails too, often on another node and sometimes first: such *echoes* say so themselves and are never the cause
while something else failed. Among the others the earliest counts; hosts' clocks are compared for that, for people only. A failure whose
ranks somebody took over is healed, and ended nothing.
May not know: how it was observed, how it is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from tmrun.core.model import End, Failure, RankMap

_ECHOES = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket closed", "connection was closed",
    "recvBytes failed", "sendBytes failed", "remote process exited", "Timed out waiting", "ncclRemoteError", "ailed to recv, got 0 bytes",
    "ailed to send, sent 0 bytes", "connection reset by peer", "Application timeout caused pair closure", "Connection timed out",
    "client socket has timed out", "clients joined", "Connection closed by remote peer", "Got completion from peer",
    "Watchdog caught collective operation timeout",
)  # fmt: skip
_ABORTED = 134
"""128 + SIGABRT: how C++ ends a process for an error that nobody catches, NCCL's watchdog among others."""


def is_echo(code: int, error: str, tail: Sequence[str]) -> bool:
    """Whether a worker's last words say that it lost a peer: ``error``, its exception as far as it left one (all of it, also what it was
    raised from), else the ``tail`` of its stderr. Other signals than SIGABRT come from outside. Wrongly called an echo, an error of the
    program costs a short wait for the peer's fate; the other way round, a lost machine ends the job."""
    if code > 128 and code != _ABORTED:
        return False
    words = [error] if error else list(tail)
    return any(sign in line for line in words for sign in _ECHOES)


def unanswered(failures: Sequence[Failure], maps: Sequence[RankMap]) -> list[Failure]:
    """Those whose slot has not been given to anybody since. ``maps`` of the job, oldest first."""
    given: dict[int, int] = {}
    for new in maps:
        slots = range(len(new.seats)) if new.epoch == new.generation else [m.slot for m in new.moves]
        given |= dict.fromkeys(slots, new.epoch)
    return [f for f in failures if f.epoch >= given.get(f.slot, 0)]


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The first that is no echo; all echoes: the first."""
    return min(failures, key=lambda f: (f.echo, f.time, f.rank))


def error_file(failure: Failure) -> dict[str, object]:
    """The cause as ``torch.distributed.elastic`` writes it to the launcher's own $TORCHELASTIC_ERROR_FILE."""
    text = failure.message or failure.hint or (failure.signal and f"killed by {failure.signal}") or f"exit code {failure.exit_code}"
    return _error_file(text, failure.traceback or "\n".join(failure.tail), failure.time, failure.exit_code)


def end_file(end: End, time: float) -> dict[str, object]:
    """The same of a job that no worker's own end explains (a hang, a machine that nobody replaced)."""
    return _error_file(end.reason, "", time, end.exit_code)


def _error_file(text: str, stack: str, time: float, code: int) -> dict[str, object]:
    return {"message": {"message": text, "extraInfo": {"py_callstack": stack, "timestamp": str(int(time))}, "errorCode": code}}
