"""bench/scale.py over several sizes, one row a size, resumable. May not know: how it simulates agents."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.compare import campaign, results
from bench.compare.machine import busy_share, this_machine

_PROGRAM = Path(__file__).resolve().parents[1] / "scale.py"
_SIZE_S = 3600.0


def sweep(sizes: Sequence[int], path: Path) -> None:
    """Each size that has no row yet, up to the first that fails."""
    have = {row["hosts"] for row in results.read(path) if "hosts" in row}
    for hosts in sizes:
        if hosts in have:
            continue
        campaign.tell(f"{hosts} simulated agents")
        row = one(hosts)
        results.append(path, row)
        if row["outcome"] != "done":
            campaign.tell(f"{row['outcome']}; larger sizes are left out")
            return


def one(hosts: int) -> dict[str, Any]:
    """Its row; ``outcome`` says whether there are figures."""
    head = {"hosts": hosts, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "machine": this_machine().as_json()}
    head["busy_before"] = busy_share()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder) / "out.json"
        argv = [sys.executable, str(_PROGRAM), str(hosts), "--json", str(out)]
        try:
            code = subprocess.run(argv, check=False, stdout=sys.stderr, timeout=_SIZE_S).returncode
        except subprocess.TimeoutExpired:
            return {**head, "outcome": f"not within {_SIZE_S / 60:.0f} minutes"}
        if code or not out.exists():
            return {**head, "outcome": f"exit code {code}"}
        (figures,) = json.loads(out.read_text())
    return {**head, "outcome": "done", "figures": figures}
