"""Every error that tmrun raises on purpose, and the exit code a command ends with.

    TmrunError                  exit 1
    ├── UsageError              2   bad input: what, where, what to do
    ├── RefusedError            3   a safety check said no
    ├── StillRunningError       4   timed out, the operation goes on
    ├── NotFoundError           7   no such job or node
    ├── Interrupted             128 + n   signal n ended the launch
    ├── StoreError              6
    │   ├── StoreUnavailable    6   no answer within the deadline; nothing was applied, or it was only a read
    │   ├── OutcomeUnknown      5   sent, no answer: it may have been applied; re-read before retrying
    │   ├── LeaseGone           6   the lease named in a request has expired
    │   └── StoreDenied         6   authentication or permission
    ├── CodecError              1   (in codec) a stored record that this version cannot read
    ├── WireError               1   an agent and a worker do not understand each other
    └── WorkerError             1   misuse inside the training process, or a switch that cannot be done

Messages are lower case, the fact first, then what to do next. May not know: how they are shown.
"""

from __future__ import annotations


class TmrunError(Exception):
    """Root of the tree; ``exit_code`` is what a command ends with when this reaches the user."""

    exit_code = 1


class UsageError(TmrunError):
    """Bad input; the message says what is wrong, where, and what to do."""

    exit_code = 2


class RefusedError(TmrunError):
    """A safety check said no; nothing was changed."""

    exit_code = 3


class StillRunningError(TmrunError):
    """The wait timed out; the operation goes on."""

    exit_code = 4


class NotFoundError(TmrunError):
    """No such job, node or operation."""

    exit_code = 7


class Interrupted(TmrunError):
    """A signal ended the command; ``name`` is its name, for the message."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(f"interrupted by {name}")
        self.exit_code = 128 + number


class StoreError(TmrunError):
    """The store could not do what was asked. ``brief``: that, for those who tell it beside much else; `tmrun doctor` finds out more."""

    exit_code = 6

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.brief = message


class StoreUnavailable(StoreError):
    """No answer within the deadline; nothing was applied, or it was only a read."""

    def __init__(self, message: str, brief: str = "") -> None:
        super().__init__(message)
        self.brief = brief or message


class OutcomeUnknown(StoreError):
    """Sent, but no answer: it may have been applied. Re-read before any retry."""

    exit_code = 5


class LeaseGone(StoreError):
    """The lease named in the request does not exist (any more)."""


class StoreDenied(StoreError):
    """Authentication failed or the user lacks a permission."""


class WireError(TmrunError):
    """A malformed or unexpected message between an agent and a worker."""


class WorkerError(TmrunError):
    """Misuse inside the training process, or a switch that cannot be done."""
