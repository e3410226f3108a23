"""From the fault to the first good step: ``python -m bench.detection [--lease-ttl 2] [--hang-timeout 4] [--rounds 1]``.

One job of 2 nodes x 2 processes and a standby on this machine; one fault after the other on the node that holds slot 1. For each: the
seconds from the fault until somebody knew of it (detected), until the coordinator proposed the moves (decided), until the new map was
committed (moved), the pause that the slowest stayer measured (end of the last step before -> end of the first new step, less a step; when
all workers start again, from the fault to their first step), and whom the history blames. Times come from the job's own events and
history. Then another job, with ``--straggler drain``, for nodes that are slow. Prints a Markdown table. What this machine does not allow
(a full disk and used-up memory need root, tmpfs and cgroups) is said in its row.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "e2e")]

import psutil  # noqa: E402
from chaos import FAULTS, Chaos  # noqa: E402
from e2e_lab import Lab, make_lab, wait_for  # noqa: E402
from machine import Denied, full, no_memory, small_disk  # noqa: E402

ORDER = (
    "drain",  # later on it would wait for the standby, which has failed by then, to cool down
    "worker SIGKILL",
    "worker SIGSEGV",
    "worker raises",
    "worker exits with 3",
    "agent SIGKILL",
    "node gone",
    "agent SIGSTOP",
    "worker SIGSTOP",
    "worker holds its GIL",
    "worker loops for ever",
    "worker skips a collective",
    "out of memory",
    "disk full",
    "node and standby at once",
    "joiner dies",
    "store and worker at once",
    "connections cut",
)
SLOW = {"slow by 20 %": 0.2, "3 times as slow": 2.0}
"""Name -> seconds that a step of one second takes more."""
NOBODY = ("connections cut", "worker raises", "worker exits with 3")
"""No node is to blame."""
_SEEN = ("killed by", "exit code", "hang:", "is frozen", "is gone", "lost a connection", "ended (", "is slow", "plan:")


def events(lab: Lab) -> list[dict[str, Any]]:
    """The job's story so far."""
    return [json.loads(line) for line in lab.cli("events", "-o", "json").stdout.splitlines()]


def after(found: list[dict[str, Any]], began: float, *signs: str) -> float | None:
    """Seconds until the first event that contains one of the signs."""
    times = [e["time"] for e in found if e["time"] >= began and any(s in e["text"] for s in signs)]
    return min(times) - began if times else None


def strike(chaos: Chaos, name: str, active: dict[str, Any], spare: dict[str, Any], disk: Path | None, undo: ExitStack) -> None:
    """Let it happen; what has to be put right afterwards goes onto ``undo``. Raises Denied where this machine does not allow it."""
    if name in FAULTS:
        FAULTS[name](chaos, active, spare)
    elif name == "node gone":
        for pid in (chaos.agent(active), *active["pids"]):
            os.kill(pid, 9)
    elif name == "out of memory":
        agent = psutil.Process(chaos.agent(active))
        undo.enter_context(no_memory([p.pid for p in (agent, *agent.children(recursive=True))], 200))
        chaos.plant(active["ranks"][0], "memory")
    elif name == "disk full":
        undo.enter_context(full(disk))
        chaos.plant(active["ranks"][0], "print")
    elif name in SLOW:
        (chaos.lab.folder / "slow").write_text(f"{active['name']} {SLOW[name]}")
    else:
        chaos.plant(active["ranks"][0], {"worker raises": "raise", "worker exits with 3": "exit"}[name])


def measure(lab: Lab, chaos: Chaos, name: str, disk: Path | None = None) -> dict[str, Any]:
    """Strike once; the row."""
    before = lab.wait_warm()
    seated = {n["slot"]: n for n in before["nodes"] if n["slot"] is not None}
    spare = next(n for n in before["nodes"] if n["slot"] is None and n["state"] == "standby")
    with ExitStack() as undo:
        began = time.time()
        try:
            strike(chaos, name, seated[1], spare, disk, undo)
        except Denied as error:
            return {"fault": name, "why": str(error), "right": True}
        row, pause = settled(lab, name, before["epoch"], began)
    told = events(lab)
    wanted = "" if name in NOBODY else seated[1]["name"]
    return {
        "fault": name,
        "detected": after(told, began, *_SEEN),
        "decided": after(told, began, "plan:", "connecting again", "cordoned", "drain", "restarting all workers"),
        "moved": after(told, began, f"committed epoch {row['epoch']}"),
        "pause": pause,
        "blamed": row["leaver"] or ("the program" if row["cause"] == "restart" else "nobody"),
        "right": row["leaver"] == wanted,
    }


def settled(lab: Lab, name: str, epoch: int, began: float) -> tuple[dict[str, Any], float]:
    """The map that answers the fault, and the seconds that it cost."""

    def done() -> tuple[dict[str, Any], float] | None:
        rows = [r for r in lab.history() if r["epoch"] > epoch]
        if rows and rows[-1]["cause"] == "restart":
            return (rows[-1], time.time() - began) if (lab.status().get("step") or 0) >= 1 else None
        known = [r for r in rows if r["pause_s"] is not None]
        return (known[-1], known[-1]["pause_s"]) if known else None

    found: tuple[dict[str, Any], float] = wait_for(f"recovery from {name}\n{lab.output()}", done)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| fault | detected s | decided s | moved s | pause s | blamed | right |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if "why" in row:
            lines.append(f"| {row['fault']} | not run: {row['why']} | | | | | |")
            continue
        cells = [f"{row[c]:.2f}" if row[c] is not None else "–" for c in ("detected", "decided", "moved", "pause")]
        lines.append(f"| {row['fault']} | {' | '.join(cells)} | {row['blamed']} | {'yes' if row['right'] else 'NO'} |")
    return "\n".join(lines)


@contextmanager
def disk() -> Iterator[Path | None]:
    """A small one for the logs of all nodes; None where none may be mounted."""
    with tempfile.TemporaryDirectory(prefix="det") as folder, ExitStack() as mounted:
        try:
            found: Path | None = mounted.enter_context(small_disk(Path(folder), "4m"))
        except Denied:
            found = None
        yield found


@contextmanager
def job(*flags: str, pace: str = "0.3") -> Iterator[tuple[Lab, Chaos]]:
    """A launch that trains for ever."""
    with tempfile.TemporaryDirectory(prefix="det") as folder:
        lab = make_lab(Path(folder))
        chaos = Chaos(lab, random.Random(1))
        shape = ("--local-nodes", "3", "--nnodes", "2", "--nproc-per-node", "2", "--standby", "1", "--max-restarts", "3")
        more = {"TEST_PACE_S": pace, "TEST_SLOW": str(lab.folder / "slow"), **chaos.environment}
        lab.launch(*shape, *flags, steps=100_000, **more)
        try:
            yield lab, chaos
        finally:
            lab.cli("stop")
            lab.close()


def main() -> int:
    """Run all faults; 1 when somebody was blamed wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lease-ttl", default="2")
    parser.add_argument("--hang-timeout", default="4")
    parser.add_argument("--rounds", type=int, default=1)
    wanted = parser.parse_args()
    timers = ("--lease-ttl", wanted.lease_ttl, "--hang-timeout", wanted.hang_timeout)
    rows = []
    with disk() as logs:
        files = () if logs is None else ("--redirects", "1", "--log-dir", str(logs))
        with job(*timers, *files) as (lab, chaos):
            rows += [measure(lab, chaos, name, logs) for _ in range(wanted.rounds) for name in ORDER]
    for name in SLOW:
        with job(*timers, "--straggler", "drain", pace="1.0") as (lab, chaos):
            rows.append(measure(lab, chaos, name))
    print(f"{platform.machine()}, {os.cpu_count()} cores, --lease-ttl {wanted.lease_ttl}, --hang-timeout {wanted.hang_timeout}\n")
    print(table(rows))
    return 0 if all(r["right"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
