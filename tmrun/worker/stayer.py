"""A process that keeps its rank while others move: stopping for a drain, parking in a failure.

    drain     all agreed (in a vote) on a stop step; there everybody waits for Commit or Abort, switches, goes on. The leaver hands over.
    failure   park: wait for a Prepare and for our build, say where we are, wait for Commit. Abort: stay parked, another Prepare follows.
A rank may be lost after a drain's commit and before its stop step. Nothing of the drain has happened on a rank that parks then, so it is
superseded by the failure's migration; a leaver that parks has nobody to hand over to, and ends. May not know: the step's block.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import NoReturn

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.core.watchdog import Place
from tmrun.worker import fixups, handover
from tmrun.worker.board import Pending
from tmrun.worker.build import Status
from tmrun.worker.link import fence
from tmrun.worker.output import flush_everything
from tmrun.worker.process import Process
from tmrun.worker.state import Snapshot

_UNEXPLAINED_S = 1800.0
"""How long a communication error may stay unexplained by the agent before it is raised."""


@dataclass
class Stop:
    """An agreed stop for a drain."""

    pending: Pending
    step: int


def stop_here(process: Process, pending: Pending, number: int) -> None:
    """The agreed boundary before step ``number``: wait for the decision, carry it out."""
    process.report_progress(number)
    process.pulse.at(Place.PARKED)
    began = time.monotonic()
    process.board.wait(lambda: pending.gone or pending.commit is not None)
    if pending.commit is None:
        return
    if pending.commit.target != number:
        raise WorkerError(f"told to switch at step {pending.commit.target}, but this rank stopped at step {number}")
    waited = time.monotonic() - began
    process.state.forget_gathers()
    if process.leaves(pending):
        _leave(process, pending, number)
    process.ledger.switched()
    switch_s = process.live.install(pending, process.board)
    handover.restart_snapshots(process, number)
    process.pulse.switched()
    process.pace.switched(pending.commit.epoch, redo=False)
    phases = {"detect": 0.0, "wait": waited, "switch": switch_s, "state": 0.0}
    process.link.send(wire.Switched(pending.commit.epoch, number, phases, 0, *process.live.fates(pending)))


def _leave(process: Process, pending: Pending, number: int) -> NoReturn:
    assert pending.build is not None
    built = pending.build.built
    assert built.transfer is not None
    handover.give_all(process, built.transfer.backend, built.direct.backends if built.direct else {}, number)
    flush_everything()
    process.link.send(wire.Left(pending.prepare.epoch))
    os._exit(0)


def park(process: Process, step: int) -> Pending:
    """Wait, with everything as it is, until a failure migration is committed. ``step`` is the one that has not happened here."""
    process.report_progress(step)
    process.pulse.at(Place.PARKED)
    while True:
        pending = _await_failure(process)
        if not await_build(process, pending):
            continue
        assert pending.build is not None
        covers = process.ledger.replicas(process.rank, pending.prepare.ranks)
        holdings = process.snapshots.holdings()
        witnessed = process.ledger.witnessed(pending.prepare.ranks)
        groups, kept = pending.build.built.ranks, pending.build.built.kept
        process.link.send(
            wire.Prepared(
                pending.id,
                step=step,
                next_step=step,
                covers=covers,
                groups=groups,
                snapshots=holdings,
                kept=kept,
                witnessed=witnessed,
                idle_s=process.pulse.idle_s,
            )
        )
        if await_decision(process, pending):
            return pending


def await_build(process: Process, pending: Pending) -> bool:
    """Whether our side gets ready; if it fails, wait until the migration is off."""
    build = pending.build
    assert build is not None, pending
    process.board.wait(lambda: pending.gone or build.status is not Status.BUILDING)
    if not pending.gone and build.status is Status.FAILED:
        process.board.wait(lambda: pending.gone)
    return not pending.gone


def await_decision(process: Process, pending: Pending) -> bool:
    """Whether it is committed."""
    process.board.wait(lambda: pending.gone or pending.commit is not None)
    return pending.commit is not None


def _await_failure(process: Process) -> Pending:
    while True:
        if not process.board.wait(lambda: process.board.failure is not None or _left_behind(process), _UNEXPLAINED_S):
            error = process.trouble.error if process.trouble else None
            raise WorkerError(f"a communication error was not explained within {_UNEXPLAINED_S:g} s") from error
        if _left_behind(process):
            flush_everything()
            fence(f"rank {process.rank} cannot reach the step at which it was to hand over: another rank was lost")
        pending = process.board.failure
        if pending is not None:
            pending.reached = True
            return pending


def _left_behind(process: Process) -> bool:
    """Whether the committed map has somebody else as this rank."""
    drain = process.board.drain
    return drain is not None and drain.commit is not None and process.leaves(drain)


def carry_out(process: Process, pending: Pending, undo: Snapshot | None) -> None:
    """A committed failure migration, at the boundary before its target. ``undo``: the start of the step that is to run again."""
    commit = pending.commit
    assert commit is not None
    trouble, process.trouble = process.trouble, None
    process.ledger.switched()
    switch_s = process.live.install(pending, process.board)
    fixups.reset_ddp(process.state.ddps)
    process.counters.since_reset = 0
    if commit.rollback:
        handover.roll_back(process, commit.target)
    elif undo is not None:
        process.state.rollback(undo)
    else:
        process.state.forget_gathers()
    handover.restart_snapshots(process, commit.target)
    began = time.monotonic()
    sent = handover.feed(process, pending, commit)
    process.live.state_moved()
    # a peer that vanished without a word shows only as a step that does not end
    sign = min(trouble.since, process.pace.overdue_at) if trouble else process.pace.overdue_at
    phases = {
        "detect": max(0.0, pending.noticed - sign),
        "wait": pending.committed - pending.noticed,
        "switch": switch_s,
        "state": time.monotonic() - began if sent else 0.0,
    }
    process.pulse.switched()
    process.pace.switched(commit.epoch, redo=undo is not None or commit.rollback)
    process.link.send(wire.Switched(commit.epoch, commit.target, phases, sent, *process.live.fates(pending)))
