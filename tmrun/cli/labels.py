"""Where a host is: its labels, from the flags, a file, its name, and Slurm, in this order of precedence.

May not know: what labels are for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tmrun.cli import slurm
from tmrun.core import placement


@dataclass(frozen=True, slots=True)
class Labels:
    """The sources; ``of`` a host. ``file``: lines ``HOST KEY=VALUE ...``, ``pattern``: named groups that are levels."""

    given: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    pattern: re.Pattern[str] | None = None

    def of(self, host: str) -> dict[str, str]:
        """Raises UsageError, OSError."""
        named = placement.labels_in(host, self.pattern) if self.pattern else {}
        listed = placement.labels_from_file(self.file.read_text(), host, str(self.file)) if self.file else {}
        return {**slurm.labels(os.environ), **named, **listed, **self.given}
