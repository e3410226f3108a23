"""The pause of a drain against what it may take: one step, and the state at 70 % of what a plain gloo send reaches; in turn, in one run.

    python bench/drain.py [--mb 50,200] [--repeats 5] [--step-ms 100] [--switch slot]

Method: two processes send each other as many bytes as plain tensors (transfer.py). Then a job of two ranks (DDP, AdamW; the script of
overhead.py on the tests' agent) whose rank 1 is drained to a warm standby. The pause is rank 0's: from the end of the last step before to
the end of the first new one, less the median step; the state's bytes are what the joiner received. All on one machine's loopback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import overhead
import transfer

SHARE = 0.7
"""Of the plain rate, which the state may take."""
_STEPS = 24
_DRAINED = 10


@dataclass(frozen=True)
class Drain:
    """Seconds; ``plain_s``: the same bytes as plain tensors."""

    bytes: int
    plain_s: float
    step_s: float
    pause_s: float

    @property
    def allowed_s(self) -> float:
        """See the module's text."""
        return self.step_s + self.plain_s / SHARE


def main() -> None:
    """Run, print a table; exit code 1 if a median pause is longer than allowed."""
    mine = overhead.parser(__doc__)
    mine.add_argument("--mb", default="50,200", help="sizes of the state of a rank")
    mine.add_argument("--repeats", type=int, default=5)
    args = mine.parse_args()
    sizes = [int(size) for size in args.mb.split(",")]
    found: dict[int, list[Drain]] = {size: [] for size in sizes}
    for _ in range(args.repeats):
        for size in sizes:
            found[size].append(once(args, size))
            print(found[size][-1], file=sys.stderr, flush=True)
    print(f"{args.repeats} drains each in turn, {os.cpu_count()} cores, switch {args.switch}; seconds, medians [least–most]\n")
    print("| state of a rank | a step | plain gloo | the pause may take | pause |\n|---|---|---|---|---|")
    for drains in found.values():
        cells = (spread([getattr(d, name) for d in drains]) for name in ("step_s", "plain_s", "allowed_s", "pause_s"))
        print(f"| {drains[0].bytes / 1e6:.0f} MB | {' | '.join(cells)} |")
    late = [drains for drains in found.values() if median(drains, "pause_s") > median(drains, "allowed_s")]
    sys.exit(1 if late else 0)


def median(drains: list[Drain], name: str) -> float:
    """Of one figure."""
    return statistics.median(getattr(d, name) for d in drains)


def spread(values: list[float]) -> str:
    """``0.123 [0.110–0.150]``."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}–{max(values):.3f}]"


def once(args: argparse.Namespace, mb: int) -> Drain:
    """One of each."""
    with tempfile.TemporaryDirectory(prefix="tmrun-drain-") as folder:
        moved, pause_s, step_s = drained(args, Path(folder), mb)
        return Drain(moved, plainly(Path(folder), moved), step_s, pause_s)


def drained(args: argparse.Namespace, folder: Path, mb: int) -> tuple[int, float, float]:
    """(bytes, pause, median step) of a job of which a rank is drained."""
    sys.path.insert(0, str(overhead.ROOT / "tests" / "worker"))
    from cluster import Cluster

    from tmrun import wire

    out = folder / "out.json"
    flags = ["--steps", str(_STEPS), "--step-ms", str(args.step_ms), "--out", str(out), "--wide", str(transfer.layers(mb))]
    cluster = Cluster(folder, args.world, flags, {"TMRUN_SWITCH": args.switch}, overhead.SCRIPT)
    try:
        joiner = cluster.standby(1)
        cluster.start()
        cluster.reach(_DRAINED)
        cluster.drain(1, joiner)
        moved = cluster.expect(joiner, wire.Switched, epoch=2).bytes
        pause_s = cluster.expect(cluster.ranks[0], wire.Resumed, epoch=2).pause_s
        for worker in cluster.ranks.values():
            assert worker.process.wait(600) == 0, cluster.output()
    finally:
        cluster.close()
    return moved, pause_s, statistics.median(json.loads(out.read_text())["steps"][3:_DRAINED])


def plainly(folder: Path, size: int) -> float:
    """Seconds that as many bytes take as plain tensors, the median of some."""
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.SimpleQueue()
    ends = [spawn.Process(target=transfer.plain_end, args=(rank, f"{folder}/store", size, results)) for rank in (0, 1)]
    for process in ends:
        process.start()
    seconds: float = results.get()
    for process in ends:
        process.join()
    return seconds


if __name__ == "__main__":
    main()
