"""What tmrun costs in every step: the same training script under torchrun and under tmrun's worker runtime, in turn.

    python bench/overhead.py [--step-ms 100] [--steps 60] [--repeats 4] [--world 2] [--switch slot] [--fill sleep]
                             [--slack]

Method: a small GPT under DDP. Between forward and backward pass ``--step-ms`` go by asleep, as in a step that waits for a GPU (so all
that tmrun does finds cold caches and a core that has to wake up), or computing; then ranks meet, for the gradients, and update. With
``--slack`` the time goes by after they met, and they do so again only in the next step: each rank has 100 ms to make good what it was late,
which an agreement before the update takes from it, and real steps do not have. A run's figure is the median time from the start of one step
to the start of the next on rank 0, the first ten left out; the runs alternate, so that a slow moment of the machine meets all.
Under tmrun the workers run the real bootstrap against the tests' agent (same socket and messages as the real one). The last rows
come from inside: the mean time spent in begin, vote and end of a step, the highest tenth left out. In a vote the ranks wait for the slowest
one; the next collective would have done that otherwise. How much any agreement costs, the second row shows: torchrun with one
number more that all ranks sum up before each update. Of a collective's call: what is added once the first step is over, in all and where
the recorder was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("overhead_script.py")
AGREES = "torchrun, one agreement"


def main() -> None:
    """Run, print a table."""
    args = arguments()
    runs: dict[str, list[dict[str, Any]]] = {"torchrun": [], AGREES: [], "tmrun": []}
    for number in range(args.repeats):
        order = list(runs) if number % 2 else list(reversed(runs))
        for name in order:
            with tempfile.TemporaryDirectory(prefix="tmrun-overhead-") as folder:
                runs[name].append(
                    under_tmrun(args, Path(folder)) if name == "tmrun" else under_torchrun(args, Path(folder), name == AGREES)
                )
                print(f"{name:26s} run {number}: {1e3 * runs[name][-1]['step_s']:.2f} ms a step", file=sys.stderr, flush=True)
    print(table(args, runs))


def parser(description: str | None) -> argparse.ArgumentParser:
    """What every bench of this script can be told."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--step-ms", type=float, default=100)
    made.add_argument("--fill", choices=["sleep", "compute"], default="sleep")
    made.add_argument("--slack", action="store_true")
    made.add_argument("--world", type=int, default=2)
    made.add_argument("--switch", default="slot", choices=["slot", "shim"])
    return made


def arguments() -> argparse.Namespace:
    """The command line."""
    mine = parser(__doc__)
    mine.add_argument("--steps", type=int, default=60)
    mine.add_argument("--repeats", type=int, default=4)
    return mine.parse_args()


def flags(args: argparse.Namespace, out: Path) -> list[str]:
    """The script's command line."""
    found = ["--steps", str(args.steps), "--step-ms", str(args.step_ms), "--fill", args.fill, "--out", str(out)]
    return [*found, "--slack"] if args.slack else found


def under_torchrun(args: argparse.Namespace, folder: Path, agree: bool) -> dict[str, Any]:
    """One run."""
    out = folder / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.world), str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *flags(args, out), *(["--agree"] if agree else [])], check=True, env=environment, capture_output=True)
    return read(out)


def under_tmrun(args: argparse.Namespace, folder: Path, *more: str, **environment: str) -> dict[str, Any]:
    """One run, on the worker tests' harness; with ``more`` flags of the script."""
    sys.path.insert(0, str(ROOT / "tests" / "worker"))
    from cluster import Cluster

    out = folder / "out.json"
    cluster = Cluster(folder, args.world, [*flags(args, out), *more], {"TMRUN_SWITCH": args.switch, **environment}, SCRIPT)
    try:
        cluster.start(at_once=True)
        for worker in cluster.ranks.values():
            assert worker.process.wait(600) == 0, cluster.output()
    finally:
        cluster.close()
    return read(out)


def read(out: Path) -> dict[str, Any]:
    """What rank 0 wrote."""
    found: dict[str, Any] = json.loads(out.read_text())
    found["step_s"] = statistics.median(found["steps"][10:])
    return found


def table(args: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown."""
    plain, agreeing, ours = (statistics.median(r["step_s"] for r in runs[name]) for name in runs)
    spread = max(abs(r["step_s"] - plain) for r in runs["torchrun"])
    inside = {part: statistics.median(usual(r["inside"][part], args.steps) for r in runs["tmrun"]) for part in runs["tmrun"][0]["inside"]}
    waits = inside.pop("waits")
    inside["vote"] -= waits
    rows = {
        "begin": inside["begin"],
        "vote": inside["vote"],
        "end, between": inside["end"] + inside["between"],
        "all": sum(inside.values()),
    }
    filled = f"{args.fill}, after ranks met" if args.slack else args.fill
    lines = [
        f"world {args.world}, {args.steps} steps filled up by {filled}, {args.repeats} runs each in turn, {os.cpu_count()} cores, "
        f"switch {args.switch}",
        "",
        "| | ms a step | of a step |",
        "|---|---|---|",
        f"| torchrun | {1e3 * plain:.2f} (runs differ by up to {1e3 * spread:.2f}) | |",
        f"| {AGREES} | {1e3 * agreeing:.2f} | {100 * (agreeing - plain) / plain:+.2f} % |",
        f"| tmrun | {1e3 * ours:.2f} | {100 * (ours - plain) / plain:+.2f} % |",
        *[f"| tmrun's own work: {name} | {1e3 * seconds:.3f} | {100 * seconds / plain:.2f} % |" for name, seconds in rows.items()],
        f"| in the vote: waiting for the slowest rank | {1e3 * waits:.3f} | {100 * waits / plain:.2f} % |",
        *[
            f"| a call of a collective: {part} | {1e3 * min(r['calls'][part] for r in runs['tmrun']):.5f} | |"
            for part in ("all", "recorder")
        ],
    ]
    return "\n".join(lines)


def usual(times: list[float], steps: int) -> float:
    """Mean seconds a step, the first ten steps and the highest tenth left out."""
    kept = sorted(times[len(times) * 10 // steps :])
    kept = kept[: len(kept) * 9 // 10]
    return sum(kept) / max(1, len(kept))


if __name__ == "__main__":
    main()
