"""What the agent says, on the link thread.

    Prepare   standby: post it, the main thread builds once it is parked as the right rank
              else: refuse if it cannot work; post it; in a failure cut all live connections; build in the background
    Commit    post
    Abort     post; of a committed drain, to its leaver: a rank was lost. Whoever is not at the stop step yet cannot get there
    Park      cut all live connections: no step can be completed, and the main thread parks when it finds a peer lost
May not know: what the main thread does with it.
"""

from __future__ import annotations

import time
from functools import partial

from tmrun import wire
from tmrun.core.plural import many
from tmrun.worker import stuck
from tmrun.worker.board import Pending
from tmrun.worker.build import Build, Plan, Role, Status
from tmrun.worker.process import SETTLED_STEPS, Phase, Process


def deliver(process: Process, message: wire.Message) -> None:
    """Take one message."""
    if isinstance(message, wire.Prepare):
        _on_prepare(process, Pending(message, time.monotonic()))
    elif isinstance(message, wire.Park):
        if process.phase is Phase.LOOP and process.board.failure is None:
            process.live.abort()
            process.pulse.cut()
    elif isinstance(message, wire.Commit | wire.Abort):
        process.board.decide(message)
        drain = process.board.drain
        if isinstance(message, wire.Abort) and drain is not None and drain.id == message.migration and process.leaves(drain):
            process.live.abort()  # no harm to a handover: it has a connection of its own


def new_build(process: Process, pending: Pending, role: Role) -> Build:
    """A build for a migration, not started yet."""
    live = process.live
    plan = Plan(pending.prepare, role, process.world, tuple(live.groups), live.device.torch_device, process.peers_of(pending.prepare.rank))
    return Build(plan, process.live.new_store, partial(_build_changed, process, pending))


def _on_prepare(process: Process, pending: Pending) -> None:
    newest = process.board.newest
    if process.sandboxed and (newest is None or newest.commit is None):
        process.board.post(pending)
        process.tour.expect(pending, process.rank)
        return
    reason = _unfit(process, pending)
    if reason is not None:
        process.link.send(wire.Refused(pending.id, reason))
        return
    pending.build = new_build(process, pending, Role.LEAVER if process.leaves(pending) else Role.STAYER)
    process.board.post(pending)
    if pending.failure:
        process.live.abort()
        stuck.watch(process, pending)
    pending.build.start()


def _unfit(process: Process, pending: Pending) -> str | None:
    if process.phase is not Phase.LOOP:
        return f"rank {process.rank} is {process.phase.value}"
    if pending.failure and process.counters.done < SETTLED_STEPS:
        return f"rank {process.rank} has done {many(process.counters.done, 'step')}; a crash can be healed after {SETTLED_STEPS}"
    if full := process.live.groups.full():
        return f"process group {full} cannot be switched again in this process"
    return None


def _build_changed(process: Process, pending: Pending, build: Build) -> None:
    if build.status is Status.FAILED:
        process.link.send(wire.Refused(pending.id, f"rank {process.rank}: {build.reason}", again=True))
    process.board.poke()
