"""The faults: what happens to whom. Each returns what tells whether the event itself is over (a drain takes its time)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from bench.compare.lab import Lab, TrialError, kill
from bench.compare.measure import Record
from bench.compare.systems.base import System

Over = Callable[[], bool]
STORE_HOST = "node0"


def at_once() -> bool:
    """For events that are over when they have happened."""
    return True


def worker_on(records: Sequence[Record], node: str) -> int:
    """Pid of the training process there."""
    return max((r for r in records if r.node == node), key=lambda r: r.end).pid


def victim_of(records: Sequence[Record], event: str) -> str:
    """The node with the highest rank that does not hold the store; for the store's loss the one that does."""
    if event == "store_host":
        return STORE_HOST
    last = max(r.step for r in records)
    candidates = [r for r in records if r.node != STORE_HOST and r.step >= last - 1]
    if not candidates:
        raise TrialError("no active node but the store's")
    return max(candidates, key=lambda r: r.rank).node


def happen(event: str, lab: Lab, system: System, victim: str) -> Over:
    """Do it, now."""
    return _ACTIONS[event](lab, system, victim)


def _kill(lab: Lab, system: System, victim: str) -> Over:
    kill(worker_on(lab.records(), victim), signal.SIGKILL)
    return at_once


def _lose(lab: Lab, system: System, victim: str) -> Over:
    lab.signal(victim, signal.SIGSTOP, signal.SIGKILL)  # stopped first: nobody there sees another one die
    return at_once


def _drain(lab: Lab, system: System, victim: str) -> Over:
    return system.drain(victim)


def _frozen(lab: Lab, system: System, victim: str) -> Over:
    kill(worker_on(lab.records(), victim), signal.SIGSTOP)
    return at_once


def _silent(lab: Lab, system: System, victim: str) -> Over:
    lab.signal(victim, signal.SIGSTOP)
    return at_once


def _dead_link(lab: Lab, system: System, victim: str) -> Over:
    assert lab.network is not None, "plan.namespaced saw to it"
    lab.network.cut(victim)
    return at_once


def _straggler(lab: Lab, system: System, victim: str) -> Over:
    lab.slow(victim)
    return at_once


_ACTIONS: dict[str, Callable[[Lab, System, str], Over]] = {
    "kill": _kill,
    "lose": _lose,
    "drain": _drain,
    "frozen": _frozen,
    "silent": _silent,
    "dead_link": _dead_link,
    "straggler": _straggler,
    "store_host": _lose,
}
