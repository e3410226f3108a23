"""Which of many failures was the cause.

A worker that loses a peer fails too, often on another node and sometimes first: such *echoes* say so themselves and are never the cause
while something else failed. Among the others the earliest counts; hosts' clocks are compared for that, for people only.
May not know: how it was observed, how it is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from tmrun.core.model import Failure

_ECHOES = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket closed", "connection was closed",
    "recvBytes failed", "sendBytes failed", "remote process exited", "Timed out waiting", "ncclRemoteError", "failed to recv, got 0 bytes",
)  # fmt: skip


def is_echo(code: int, message: str, tail: Sequence[str]) -> bool:
    """Whether a worker's last words say that it lost a peer. A signal is never an echo."""
    if code > 128:
        return False
    words = [message] if message else list(tail)
    return any(sign in line for line in words for sign in _ECHOES)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The first of the last attempt that is no echo; all echoes: the first."""
    attempt = max(f.restarts for f in failures)
    return min((f for f in failures if f.restarts == attempt), key=lambda f: (f.echo, f.time, f.rank))


def error_file(failure: Failure) -> dict[str, object]:
    """The cause as ``torch.distributed.elastic`` writes it to the launcher's own $TORCHELASTIC_ERROR_FILE."""
    text = failure.message or failure.hint or (failure.signal and f"killed by {failure.signal}") or f"exit code {failure.exit_code}"
    stack = failure.traceback or "\n".join(failure.tail)
    extra = {"py_callstack": stack, "timestamp": str(int(failure.time))}
    return {"message": {"message": text, "extraInfo": extra, "errorCode": failure.exit_code}}
