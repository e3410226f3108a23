"""What a node can account for: how far it trains, where its time went, what it knows of the job. Folded here, exported as metrics.

A node counts its own workers' pauses; of the job as a whole only the coordinator speaks, so that sums over nodes are right.
May not know: clocks (``now_s`` is monotonic and told), how metrics travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tmrun.core import conditions, report, states
from tmrun.core.heard import Heard
from tmrun.core.membership import Job
from tmrun.core.model import Copies, Host, JobState, Kind, NodeState, Timing
from tmrun.core.states import known_hosts, node_state

PHASES = ("detect", "bind", "comm", "state", "redo")
MAX_EPOCHS = 256
"""Epochs whose accounts are kept apart; older ones are only in the sums."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """``began_s``: when this node's workers first completed a step; 0: not yet."""

    began_s: float = 0.0
    step: int = 0
    step_s: float = 0.0
    accounts: Mapping[int, tuple[Kind, Mapping[int, Timing]]] = field(default_factory=dict)
    """epoch -> why, rank -> its account."""
    copies: Mapping[int, Copies] = field(default_factory=dict)
    """Local rank -> its newest copy in a partner's memory."""
    closed: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(cause, phase) -> seconds, of epochs that are not kept apart any more."""
    closed_pauses: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """cause -> how many, seconds."""


def progress(ledger: Ledger, step: int, step_s: float, now_s: float) -> Ledger:
    """The slowest worker of this node has begun ``step``."""
    return replace(ledger, step=step, step_s=step_s, began_s=ledger.began_s or now_s)


def copied(ledger: Ledger, local: int, copies: Copies) -> Ledger:
    """A worker's state has been copied to its partner."""
    return replace(ledger, copies={**ledger.copies, local: copies})


def timing(ledger: Ledger, epoch: int, kind: Kind, told: Timing) -> Ledger:
    """A worker's account of a switch; told again it replaces what it said before."""
    of_epoch = dict(ledger.accounts.get(epoch, (kind, {}))[1])
    of_epoch[told.rank] = told
    accounts = {**ledger.accounts, epoch: (kind, of_epoch)}
    ledger = replace(ledger, accounts=accounts)
    return _close(ledger, min(accounts)) if len(accounts) > MAX_EPOCHS else ledger


def _close(ledger: Ledger, epoch: int) -> Ledger:
    alone = replace(ledger, accounts={epoch: ledger.accounts[epoch]})
    rest = {e: a for e, a in ledger.accounts.items() if e != epoch}
    return replace(ledger, accounts=rest, closed=phases(alone), closed_pauses=pauses(alone))


def phases(ledger: Ledger) -> dict[tuple[str, str], float]:
    """(cause, phase) -> seconds that this node's stayers waited, all epochs."""
    sums: dict[tuple[str, str], float] = dict(ledger.closed)
    for kind, accounts in ledger.accounts.values():
        split = report.phases(kind, list(accounts.values()), moved=False)
        for phase in PHASES:
            sums[kind.value, phase] = sums.get((kind.value, phase), 0.0) + (split[f"{phase}_s"] or 0.0)
    return sums


def pauses(ledger: Ledger) -> dict[str, tuple[int, float]]:
    """cause -> how many pauses this node's stayers had, and their seconds."""
    sums = dict(ledger.closed_pauses)
    for kind, accounts in ledger.accounts.values():
        pause = report.phases(kind, list(accounts.values()), moved=False)["pause_s"]
        if pause is not None:
            count, seconds = sums.get(kind.value, (0, 0.0))
            sums[kind.value] = (count + 1, seconds + pause)
    return sums


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its samples are (labels, value). ``kind``: gauge or counter."""

    name: str
    help: str
    kind: str
    samples: tuple[tuple[Mapping[str, str], float], ...]


def _gauge(name: str, text: str, value: float, **labels: str) -> Family:
    return Family(name, text, "gauge", ((labels, value),))


def of_node(ledger: Ledger, job: Job, me: Host, now_s: float, *, store_answers: bool) -> list[Family]:
    """What this node says of itself."""
    state = node_state(job, me)[0]
    paused = pauses(ledger)
    lost = sum(seconds for _, seconds in paused.values())
    whole = max(0.0, now_s - ledger.began_s) if ledger.began_s else 0.0
    leads = job.leader is not None and job.leader.value.host == me
    by_phase = tuple(({"cause": cause, "phase": phase}, value) for (cause, phase), value in sorted(phases(ledger).items()))
    return [
        _gauge("tmrun_step", "Step that the slowest worker of this node has begun.", ledger.step),
        _gauge("tmrun_step_seconds", "Median duration of the last steps of this node.", ledger.step_s),
        Family("tmrun_node_state", "1 for the state this node is in.", "gauge", _one_hot(NodeState, state)),
        _gauge("tmrun_node_cordoned", "1 when an operator keeps this node from being chosen as a joiner.", float(job.cordoned(me))),
        _gauge("tmrun_standby_ready", "1 when this node is a warm standby that may be chosen now.", _ready(job, me)),
        _gauge("tmrun_coordinator", "1 when this node coordinates the job; only then it exports tmrun_job_*.", float(leads)),
        _gauge("tmrun_store_reachable", "1 when the store answers this node.", float(store_answers)),
        Family("tmrun_pause_phase_seconds", "Seconds that this node's workers were held up, by cause and phase.", "counter", by_phase),
        Family(
            "tmrun_pauses", "Migrations in which this node's workers stayed, by cause.", "counter",
            tuple(({"cause": c}, float(n)) for c, (n, _) in sorted(paused.items())),
        ),
        Family(
            "tmrun_pause_seconds", "Seconds between the last step before a migration and the next one, by cause.", "counter",
            tuple(({"cause": c}, s) for c, (_, s) in sorted(paused.items())),
        ),
        *_of_copies(ledger.copies.values()),
        _gauge("tmrun_training_seconds", "Seconds since this node's first step.", whole),
        _gauge("tmrun_goodput_ratio", "Share of the time since the first step not lost to pauses (ETTR).", _share(whole, lost)),
    ]  # fmt: skip


def _of_copies(copies: Collection[Copies]) -> list[Family]:
    if not copies:
        return []
    return [
        _gauge("tmrun_copy_interval_steps", "Steps between two copies of the state to a partner.", max(c.every for c in copies)),
        _gauge("tmrun_copy_bytes", "Size of the largest copy of a worker.", max(c.bytes for c in copies)),
        _gauge("tmrun_copy_seconds", "Time that training last waited for a copy.", max(c.copy_s for c in copies)),
        _gauge("tmrun_copy_send_seconds", "Time that a copy last took to its partner.", max(c.send_s for c in copies)),
    ]


def _one_hot(states: Iterable[Enum], now: Enum) -> tuple[tuple[Mapping[str, str], float], ...]:
    return tuple(({"state": str(s.value)}, float(s is now)) for s in states)


def _ready(job: Job, me: Host) -> float:
    return float(node_state(job, me)[0] is NodeState.STANDBY and not job.cordoned(me))


def _share(whole: float, lost: float) -> float:
    return max(0.0, 1.0 - lost / whole) if whole > 0 else 0.0


def of_job(job: Job, migrating_s: float) -> list[Family]:
    """What the coordinator says of the job. ``migrating_s``: for how long it has seen the open migration."""
    state = states.job_state(job)[0]
    hosts = known_hosts(job)
    counts = Counter(node_state(job, h)[0].value for h in hosts)
    warm = sum(_ready(job, h) for h in hosts)
    late = job.open_migration.id if job.open_migration and migrating_s > conditions.stuck_after_s(job) else 0
    codes = {c["code"] for c in conditions.of(job, Heard(overdue=late))}
    return [
        _gauge("tmrun_job_epoch", "Epoch of the committed rank map.", job.epoch),
        Family("tmrun_job_state", "1 for the state the job is in.", "gauge", _one_hot(JobState, state)),
        Family("tmrun_job_nodes", "Nodes by state.", "gauge", tuple(({"state": s.value}, float(counts[s.value])) for s in NodeState)),
        _gauge("tmrun_job_standbys_warm", "Warm standbys that may be chosen now.", warm),
        _gauge("tmrun_job_standbys_wanted", "Standbys that the job was launched with.", job.spec.standby if job.spec else 0),
        _gauge("tmrun_job_paused", "1 when an operator has paused automatic replacement.", float(job.pause is not None)),
        _gauge("tmrun_job_migrating_seconds", "For how long the open migration has been going on; 0: there is none.", migrating_s),
        Family(
            "tmrun_job_restarts", "Times that all workers started anew, by cause.", "counter",
            (({"cause": "machine"}, job.machine_restarts), ({"cause": "program"}, job.program_restarts)),
        ),
        _gauge("tmrun_job_requests_open", "Operators' requests that are not finished.", len(job.open_ops())),
        Family("tmrun_job_check", "1 for each check that needs a look.", "gauge", tuple(({"code": c}, 1.0) for c in sorted(codes))),
    ]  # fmt: skip
