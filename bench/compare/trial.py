"""One trial from launch to clean-up: train, wait until the spare is ready, let the event happen between two checkpoints, watch, tell.

Everything has a deadline; a trial that cannot be carried out gives a row that says why.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.compare import events, measure, plan
from bench.compare.lab import Lab, NotReady, Refused
from bench.compare.machine import Machine, busy_share
from bench.compare.network import Network
from bench.compare.plan import Trial
from bench.compare.systems import FAMILIES, System

EVERY = 20
"""Steps between checkpoints; the event happens in the middle, so that a restart loses its average."""
FIRST = 25
"""Steps before any event: the median needs some."""
ENOUGH = 20
"""New steps after which the trial is over."""
FULL_AGAIN_S = 15.0
"""Wait so long for a world that shrank to be full again: what that costs belongs to the event."""
STRAGGLER_S = 45.0
_LOOK_S = 0.1
_AFTER_READY = 15
"""Steps between the spare's readiness and the event."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: for training to begin and the spare to be ready, and after the event."""

    start_s: float = 180.0
    recover_s: float = 120.0


def run(trial: Trial, marker: str, python: str, scratch: Path, machine: Machine, patience: Patience) -> dict[str, Any]:
    """Carry it out; the row."""
    began = time.monotonic()
    row = header(trial, machine)
    row["busy_before"], row["load_before"] = busy_share(), machine.load()
    logs = scratch / "logs" / trial.key.replace(" ", "_")
    try:
        with Lab(marker, logs, network_of(trial, marker)) as lab:
            row |= _carry_out(trial, lab, FAMILIES[trial.system](trial, lab, python, scratch), patience)
    except NotReady as error:
        row |= {"outcome": "did not start", "why": str(error)}
    except Refused as error:
        row |= {"outcome": "refused", "why": str(error)}
    except Exception as error:  # one trial's trouble must not end hours of others
        row |= {"outcome": "error", "why": f"{type(error).__name__}: {error}"}
    row["wall_s"] = round(time.monotonic() - began, 1)
    return row


def header(trial: Trial, machine: Machine) -> dict[str, Any]:
    """What every row has."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"key": trial.key, "case": trial.case, "trial": plan.as_json(trial), "date": now, "machine": machine.as_json()}


def not_installed(trial: Trial, machine: Machine, why: str) -> dict[str, Any]:
    """The row of a peer that is not there."""
    return {**header(trial, machine), "outcome": "not installed", "why": why}


def network_of(trial: Trial, marker: str) -> Network | None:
    """A network with one host more than nodes, if the trial needs one."""
    if not trial.netns:
        return None
    return Network(f"b{marker[-5:]}", [f"node{i}" for i in range(trial.nodes + 1)], trial.mbit)


def _carry_out(trial: Trial, lab: Lab, system: System, patience: Patience) -> dict[str, Any]:
    start_s = patience.start_s * (3 if trial.compiled == "cold" else 1)
    system.start_all()
    lab.wait("training", lambda: _last(lab) >= FIRST, start_s)
    system.start_spare()
    lab.wait("the spare is ready", system.spare_ready, start_s, pause_s=1.0)
    ready = _last(lab)
    lab.wait("the step of the event", lambda: _last(lab) > ready + _AFTER_READY and _last(lab) % EVERY == EVERY // 2, start_s)
    records = lab.records()
    victim = events.victim_of(records, trial.event)
    step_s = measure.median_step(records, time.monotonic())
    time.sleep(step_s * (0.2 + 0.6 * (trial.rep * 0.37 % 1)))  # another place in the step each time
    at = time.monotonic()
    over = events.happen(trial.event, lab, system, victim)
    system.after_event(victim, trial.event)
    outcome, over_s = _watch(trial, lab, victim, at, over, patience.recover_s)
    found = lab.records()
    return {
        "outcome": outcome,
        "victim": victim,
        "figures": _rounded(asdict(measure.figures(found, at))),
        "over_s": over_s,
        "phases": _rounded(system.phases() or {}) or None,
        "consistent": measure.consistent(found),
        "losses": measure.probe(found),
    }


def _last(lab: Lab) -> int:
    return max(measure.completions(lab.records()), default=-1)


def _watch(trial: Trial, lab: Lab, victim: str, at: float, over: events.Over, patience_s: float) -> tuple[str, float | None]:
    """(outcome, seconds until the event itself was over)."""
    over_s: float | None = None
    full_by: float | None = None
    while time.monotonic() - at < max(patience_s, STRAGGLER_S + 1):
        if over_s is None and over():
            over_s = round(time.monotonic() - at, 3)
        time.sleep(_LOOK_S)
        if trial.event == "straggler":
            if time.monotonic() - at > STRAGGLER_S:
                return "recovered", over_s
            continue
        if over_s is None or not measure.settled(lab.records(), at + over_s, ENOUGH):
            if lab.all_ended(victim):
                return "job lost", over_s
            continue
        full_by = full_by or time.monotonic() + FULL_AGAIN_S
        if _world(lab) >= trial.nodes or time.monotonic() > full_by:
            return "recovered", over_s
    return "no recovery", over_s


def _world(lab: Lab) -> int:
    return lab.records()[-1].world


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
