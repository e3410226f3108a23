"""From the fault to the first good step: ``python -m bench.detection [--lease-ttl 2] [--hang-timeout 4] [--rounds 1]``.

One job of 2 nodes x 2 processes and a standby on this machine; one fault after the other on the node that holds slot 1. For each: the
seconds from the fault until somebody knew of it (detected), until the coordinator proposed the moves (decided), until the new map was
committed (moved), the pause that the slowest stayer measured (end of the last step before -> end of the first new step, less a step), and
whom the history blames. Times come from the job's own events and history. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "e2e")]

from chaos import FAULTS, Chaos  # noqa: E402
from e2e_lab import Lab, make_lab, wait_for  # noqa: E402

ORDER = (
    "worker SIGKILL",
    "worker SIGSEGV",
    "agent SIGKILL",
    "agent SIGSTOP",
    "worker SIGSTOP",
    "worker holds its GIL",
    "worker loops for ever",
    "worker skips a collective",
    "node and standby at once",
    "joiner dies",
    "store and worker at once",
    "connections cut",
    "drain",
)
_SEEN = ("killed by", "hang:", "is frozen", "is gone", "lost a connection", "ended (", "plan:")


def events(lab: Lab) -> list[dict[str, Any]]:
    """The job's story so far."""
    return [json.loads(line) for line in lab.cli("events", "-o", "json").stdout.splitlines()]


def after(found: list[dict[str, Any]], began: float, *signs: str) -> float | None:
    """Seconds until the first event that contains one of the signs."""
    times = [e["time"] for e in found if e["time"] >= began and any(s in e["text"] for s in signs)]
    return min(times) - began if times else None


def measure(lab: Lab, chaos: Chaos, name: str) -> dict[str, Any]:
    """Strike once; the row."""
    before = lab.wait_warm()
    seated = {n["slot"]: n for n in before["nodes"] if n["slot"] is not None}
    spare = next(n for n in before["nodes"] if n["slot"] is None and n["state"] == "standby")
    began = time.time()
    FAULTS[name](chaos, seated[1], spare)

    def settled() -> dict[str, Any] | None:
        rows = [r for r in lab.history() if r["epoch"] > before["epoch"] and r["pause_s"] is not None]
        return rows[-1] if rows else None

    row = wait_for(f"recovery from {name}\n{lab.output()}", settled)
    told = events(lab)
    return {
        "fault": name,
        "detected": after(told, began, *_SEEN),
        "decided": after(told, began, "plan:", "connecting again", "cordoned", "drain"),
        "moved": after(told, began, f"committed epoch {row['epoch']}"),
        "pause": row["pause_s"],
        "blamed": row["leaver"] or "nobody",
        "right": row["leaver"] == seated[1]["name"] or (not row["leaver"] and name == "connections cut"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| fault | detected s | decided s | moved s | pause s | blamed | right |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{row[c]:.2f}" if row[c] is not None else "–" for c in ("detected", "decided", "moved", "pause")]
        lines.append(f"| {row['fault']} | {' | '.join(cells)} | {row['blamed']} | {'yes' if row['right'] else 'NO'} |")
    return "\n".join(lines)


def main() -> int:
    """Run all faults; 1 when somebody was blamed wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lease-ttl", default="2")
    parser.add_argument("--hang-timeout", default="4")
    parser.add_argument("--rounds", type=int, default=1)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="det") as folder:
        lab = make_lab(Path(folder))
        chaos = Chaos(lab, random.Random(1))
        flags = ["--local-nodes", "3", "--nnodes", "2", "--nproc-per-node", "2", "--standby", "1", "--max-restarts", "3"]
        flags += ["--lease-ttl", wanted.lease_ttl, "--hang-timeout", wanted.hang_timeout]
        lab.launch(*flags, steps=100_000, TEST_PACE_S="0.3", **chaos.environment)
        try:
            rows = [measure(lab, chaos, name) for _ in range(wanted.rounds) for name in ORDER]
        finally:
            lab.cli("stop")
            lab.close()
    print(f"{platform.machine()}, {os.cpu_count()} cores, --lease-ttl {wanted.lease_ttl}, --hang-timeout {wanted.hang_timeout}\n")
    print(table(rows))
    return 0 if all(r["right"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
