"""What preparing a migration costs the training steps that go on meanwhile: steps that overlap with it against all others, in one run.

    python bench/prepare.py [--step-ms 100] [--rounds 12] [--world 2] [--switch slot]

Method: the script of overhead.py on the tests' agent, with a warm standby. A drain is prepared (communicators are built, everybody says
so), then called off; again and again, with some steps of rest in between. Rank 0's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import overhead

REST_STEPS = 8
FIRST = 10
"""Steps that are not counted."""


def main() -> None:
    """Run, print a table."""
    mine = overhead.parser(__doc__)
    mine.add_argument("--rounds", type=int, default=12)
    args = mine.parse_args()
    with tempfile.TemporaryDirectory(prefix="tmrun-prepare-") as folder:
        began, spans = run(args, Path(folder))
    steps = list(zip(began[FIRST:], began[FIRST + 1 :], strict=False))
    within = [b - a for a, b in steps if any(start < b and a < end for start, end in spans)]
    others = [b - a for a, b in steps if not any(start < b and a < end for start, end in spans)]
    print(f"world {args.world}, {len(spans)} times prepared, {os.cpu_count()} cores, switch {args.switch}\n")
    print("| steps | how many | median ms | worst ms |\n|---|---|---|---|")
    for name, times in (("while preparing", within), ("others", others)):
        print(f"| {name} | {len(times)} | {1e3 * statistics.median(times):.2f} | {1e3 * max(times):.2f} |")
    print(f"\n{100 * (statistics.median(within) / statistics.median(others) - 1):+.2f} % in the median")


def run(args: argparse.Namespace, folder: Path) -> tuple[list[float], list[tuple[float, float]]]:
    """When each step began, and from when to when a migration was prepared (monotonic seconds, one clock for all processes)."""
    sys.path.insert(0, str(overhead.ROOT / "tests" / "worker"))
    from cluster import Cluster

    from tmrun import wire

    out = folder / "out.json"
    steps = 40 + args.rounds * (REST_STEPS + 8)
    flags = ["--steps", str(steps), "--step-ms", str(args.step_ms), "--out", str(out)]
    cluster = Cluster(folder, args.world, flags, {"TMRUN_SWITCH": args.switch}, overhead.SCRIPT)
    spans = []
    try:
        joiner = cluster.standby(1)
        cluster.start()
        for number in range(args.rounds):
            cluster.reach(FIRST + number * REST_STEPS)
            start = time.monotonic()
            migration = cluster.prepare(wire.Kind.DRAIN, {1: joiner})
            everybody = [*cluster.ranks.values(), joiner]
            for worker in everybody:
                cluster.expect(worker, wire.Prepared, migration=migration)
            spans.append((start, time.monotonic()))
            cluster.abort(everybody)
        for worker in cluster.ranks.values():
            assert worker.process.wait(600) == 0, cluster.output()
    finally:
        cluster.close()
    return json.loads(out.read_text())["began"], spans


if __name__ == "__main__":
    main()
