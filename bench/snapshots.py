"""What copies of a fully sharded state cost: steps with the interval that tmrun chooses, with a copy every step, and without, in turn.

    python bench/snapshots.py [--step-ms 100] [--steps 120] [--repeats 3] [--layers 4] [--world 2] [--switch slot]

Method: FSDP2 on the tests' agent, steps filled up with sleep to about ``--step-ms``. A run's figure is the mean time of a step on rank 0,
from step 40 on (the interval is learned before). ``copies`` are the boundaries at which the main thread copied its state, ``ms a copy`` is
what training waited for each; sending goes on behind.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import overhead

WAYS = {"without": "1000000", "interval chosen by tmrun": "", "every step": "1"}
FIRST = 40
COPY_S = 0.0005
"""A boundary that took longer has copied."""


def main() -> None:
    """Run, print a table."""
    mine = overhead.parser(__doc__)
    mine.add_argument("--steps", type=int, default=120)
    mine.add_argument("--repeats", type=int, default=3)
    mine.add_argument("--layers", type=int, default=4)
    args = mine.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way, every in WAYS.items():
            with tempfile.TemporaryDirectory(prefix="tmrun-snapshots-") as folder:
                runs[way].append(overhead.under_tmrun(args, Path(folder), "--sharded", str(args.layers), TMRUN_SNAPSHOT_EVERY=every))
    mb = args.layers * 1024 * 1025 * 12 / args.world / 1e6
    print(
        f"FSDP2, {mb:.0f} MB of state a rank, world {args.world}, {args.repeats} runs each, {os.cpu_count()} cores, switch {args.switch}\n"
    )
    print("| copies | ms a step (runs) | of a step | copies in 100 steps | ms a copy |\n|---|---|---|---|---|")
    base = statistics.median(statistics.mean(r["steps"][FIRST:]) for r in runs["without"])
    for way, found in runs.items():
        means = [statistics.mean(r["steps"][FIRST:]) for r in found]
        copies = [s for r in found for s in r["inside"]["between"][FIRST:] if s > COPY_S]
        share = 100 * len(copies) / sum(len(r["steps"][FIRST:]) for r in found)
        each = f"{1e3 * statistics.median(copies):.1f}" if copies else ""
        middle = statistics.median(means)
        spread = ", ".join(f"{1e3 * m:.1f}" for m in means)
        print(f"| {way} | {1e3 * middle:.2f} ({spread}) | {100 * (middle / base - 1):+.2f} % | {share:.1f} | {each} |")


if __name__ == "__main__":
    main()
