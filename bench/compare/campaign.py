"""Carry out a suite: venvs, then trial after trial, each row written at once; nothing of an earlier, killed run is left in the way."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare import plan, results, trial, venvs
from bench.compare.lab import MARK
from bench.compare.machine import this_machine
from bench.compare.network import Network, possible
from bench.compare.plan import Trial
from bench.compare.systems import FAMILIES
from tmrun import procs

NOTE = "running.json"


def carry_out(trials: Sequence[Trial], path: Path, scratch: Path, folder: Path, patience: trial.Patience) -> None:
    """Run what has no row yet. ``scratch``: logs and caches, ``folder``: venvs."""
    scratch.mkdir(parents=True, exist_ok=True)
    sweep_up(scratch)
    try:
        _carry_out(trials, path, scratch, folder, patience)
    finally:
        (scratch / NOTE).unlink(missing_ok=True)


def _carry_out(trials: Sequence[Trial], path: Path, scratch: Path, folder: Path, patience: trial.Patience) -> None:
    machine, networks = this_machine(), possible()
    left = plan.to_run(trials, results.read(path))
    tell(f"{len(left)} of {len(trials)} trials to run, about {plan.minutes(left, usual_seconds(path)):.0f} minutes; rows go to {path}")
    places: dict[str, venvs.Venv] = {}
    for number, one in enumerate(left, 1):
        if plan.hopeless(one, results.read(path)):
            tell(f"{number}/{len(left)} {one.key}: not again, it never recovered")
            continue
        family = FAMILIES[one.system].venv
        if family not in places:
            tell(f"virtual environment {family}")
            places[family] = venvs.provide(family, folder)
        venv = places[family]
        if not venv.python:
            row = trial.not_installed(one, machine, venv.why)
        elif one.netns and not networks:
            row = {**trial.header(one, machine), "outcome": "error", "why": "network namespaces need root and iproute2"}
        else:
            marker = new_marker(scratch, one)
            row = trial.run(one, marker, venv.python, scratch, machine, patience)
        results.append(path, {**row, "versions": venv.versions})
        tell(f"{number}/{len(left)} {one.key}: {summary(row)}")


def summary(row: dict[str, Any]) -> str:
    """One line."""
    figures = row.get("figures") or {}
    if figures.get("downtime_s") is None:
        return f"{row['outcome']} {row.get('why', '')} ({row.get('wall_s', 0)} s)"
    return f"{row['outcome']}, down {figures['downtime_s']:.2f} s, {figures['redone']} steps redone ({row['wall_s']} s)"


def usual_seconds(path: Path) -> dict[str, float]:
    """Case -> what its last trial took."""
    return {row["case"]: row["wall_s"] for row in results.read(path) if "wall_s" in row}


def new_marker(scratch: Path, one: Trial) -> str:
    """A name for all processes of a trial, noted down so that the next run can end them if this one is killed."""
    marker = secrets.token_hex(8)
    (scratch / NOTE).write_text(json.dumps({"pid": os.getpid(), "marker": marker, "nodes": one.nodes, "netns": one.netns}))
    return marker


def sweep_up(scratch: Path) -> None:
    """End what a killed run left; refuse to work beside one that lives."""
    note = scratch / NOTE
    if not note.exists():
        return
    found = json.loads(note.read_text())
    if found["pid"] != os.getpid() and Path(f"/proc/{found['pid']}").exists():
        raise SystemExit(f"another run (pid {found['pid']}) uses {scratch}: two at a time would measure each other")
    procs.sweep(found["marker"], MARK)
    network = trial.network_of(Trial("tmrun", True, "kill", found["nodes"], netns=found["netns"]), found["marker"])
    if isinstance(network, Network):
        network.close()
    note.unlink()


def tell(text: str) -> None:
    """To the person at the console."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
