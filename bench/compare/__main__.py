"""Measure, or show what was measured.

python -m bench.compare run core                 # about 5 repetitions of every system and event; goes on where it stopped
python -m bench.compare run core nodes --reps 1 --systems torchrun,tmrun --tuned-only
python -m bench.compare show core                # a table of what there is
python -m bench.compare write                    # README, docs/bench.md and plots from the rows
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare import campaign, documents, plan, plots, report, results, scale
from bench.compare.trial import Patience

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / ".bench"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "bench.md")


def main() -> None:
    """Do as told."""
    args = arguments()
    signal.signal(signal.SIGTERM, _stop)  # so that the running trial is cleaned up
    args.action(args)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    run = verbs.add_parser("run", help="carry out suites, then show them")
    run.set_defaults(action=_run)
    show = verbs.add_parser("show", help="show what was measured")
    show.set_defaults(action=_show)
    for verb in (run, show):
        verb.add_argument("suites", nargs="+", choices=sorted(plan.SUITES), metavar="SUITE", help=", ".join(plan.SUITES))
        verb.add_argument("--results", type=Path, default=results.FOLDER, help="folder of the rows")
    run.add_argument("--reps", type=int, default=5)
    run.add_argument("--systems", default=",".join(plan.SYSTEMS), help=",".join(plan.SYSTEMS))
    run.add_argument("--events", default=",".join(plan.EVENTS), help=",".join(plan.EVENTS))
    run.add_argument("--tuned-only", action="store_true", help="leave the defaults out")
    run.add_argument("--venvs", type=Path, default=SCRATCH / "venvs", help="folder of the peers' virtual environments; made when missing")
    run.add_argument("--give-up", type=float, default=120.0, metavar="SECONDS", help="after the event")
    run.add_argument("--list", action="store_true", help="only say what would run, and for how long")
    write = verbs.add_parser("write", help="make the documents' generated parts and the plots anew")
    write.add_argument("--results", type=Path, default=results.FOLDER)
    write.set_defaults(action=_write)
    big = verbs.add_parser("scale", help="bench/scale.py over several sizes")
    big.add_argument("--sizes", default="64,128,256,512,1024,2048")
    big.add_argument("--results", type=Path, default=results.FOLDER)
    big.set_defaults(action=_scale)
    return parser.parse_args()


def chosen(args: argparse.Namespace, suite: str) -> list[plan.Trial]:
    """The suite's trials that the flags leave."""
    systems, events = args.systems.split(","), args.events.split(",")
    unknown = [x for x in systems if x not in plan.SYSTEMS] + [x for x in events if x not in plan.EVENTS]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; systems: {', '.join(plan.SYSTEMS)}; events: {', '.join(plan.EVENTS)}")
    trials = plan.SUITES[suite].trials(args.reps)
    return [t for t in trials if t.system in systems and t.event in events and (t.tuned or not args.tuned_only)]


def _run(args: argparse.Namespace) -> None:
    for suite in args.suites:
        path = args.results / f"{suite}.jsonl"
        trials = chosen(args, suite)
        if args.list:
            left = plan.to_run(trials, results.read(path))
            print(f"{suite}: {len(left)} of {len(trials)} trials, about {plan.minutes(left, campaign.usual_seconds(path)):.0f} minutes")
            continue
        campaign.carry_out(trials, path, SCRATCH, args.venvs, Patience(recover_s=args.give_up))
    if not args.list:
        _show(args)


def _show(args: argparse.Namespace) -> None:
    for suite in args.suites:
        rows = results.merge(results.read(args.results / f"{suite}.jsonl"))
        if not rows:
            print(f"{suite}: nothing measured yet")
            continue
        for title, (header, lines) in tables(suite, rows):
            _print(title, header, lines)
        print(report.provenance(rows))


def tables(suite: str, rows: list[dict[str, Any]]) -> list[tuple[str, tuple[list[str], list[list[str]]]]]:
    """(title, table) of a suite."""
    found = [(report.setting_text(s), report.comparison(rows, s)) for s in report.settings(rows)]
    if suite == "growth":
        found = [("pause growth", report.growth(rows))]
    return [*found, ("tmrun's pause by phases", report.phases(rows))]


def _print(title: str, header: list[str], lines: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in header:
        table.add_column(name)
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def recorded(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Suite -> its rows; with those of the control plane's scale."""
    suites = {suite: results.merge(results.read(folder / f"{suite}.jsonl")) for suite in plan.SUITES}
    return {**suites, documents.SCALE: results.read(folder / f"{documents.SCALE}.jsonl")}


def _write(args: argparse.Namespace) -> None:
    suites = recorded(args.results)
    for path in DOCUMENTS:
        path.write_text(documents.fill(path.read_text(), suites))
    for suite, rows in suites.items():
        if rows and suite != documents.SCALE:
            picture = DOCUMENTS[1].parent / documents.picture(suite)
            picture.parent.mkdir(exist_ok=True)
            draw = plots.growth if suite == "growth" else plots.downtime
            picture.write_text(draw(rows, f"downtime, suite {suite}"))


def _scale(args: argparse.Namespace) -> None:
    scale.sweep([int(n) for n in args.sizes.split(",")], args.results / "scale.jsonl")


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
