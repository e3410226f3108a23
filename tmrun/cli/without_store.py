"""What can be told of a job whose store does not answer: what its workers on this machine leave in memory that everybody here can read.

May not know: how it is printed.
"""

from __future__ import annotations

import time
from typing import Any

from tmrun.beacon import Beacon
from tmrun.cli import jobs
from tmrun.core import report
from tmrun.core.errors import StoreError


def status(job_id: str, error: StoreError) -> dict[str, Any]:
    """The value of ``core.report.without_store``."""
    return report.without_store(job_id, error.brief, seen(job_id))


def seen(job_id: str) -> str:
    """In which step the workers of this machine are, and when all ranks were last known to live."""
    found = [b for folder in jobs.runtime_folders(job_id) for path in folder.glob("*.*.beacon") if (b := Beacon.attach(str(path)))]
    trained = [b for b in found if b.get("proven_ns")]  # rehearsals prove nothing
    if not trained:
        return "no rank of it has trained on this machine"
    newest = max(trained, key=lambda b: b.get("proven_ns"))
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - newest.get("proven_ns") / 1e9
    return f"the workers of this machine are in step {newest.get('step')}; all ranks lived {age_s:.1f} s ago"
