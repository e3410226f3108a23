"""The one explicit global: this process's runtime, set by ``activate``, and whether the script joined. Read by ``tmrun.join``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tmrun.worker.runtime import Runtime


class Holder:
    """Holds the runtime; empty outside tmrun."""

    runtime: Runtime | None = None
    joined: bool = False
    refused: str = ""
    """Why a tmrun worker cannot be moved; empty when it can."""


HOLDER = Holder()
