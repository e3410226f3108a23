"""A process without a rank: it rehearsed one, then those of other roles (``tour``), waits parked, and takes a rank over.

    parked --Prepare(my rank)--> building --> Prepared --Commit--> groups installed --> state received --> live, at ``target``
      |  ^--------------------------Abort, or a newer Prepare--'
      '--Prepare(another rank)--> ``roles``: in place, or SoftRestart: the script runs again as that rank; the Prepare waits on the board
May not know: the live ranks' steps.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from tmrun import wire
from tmrun.core.watchdog import Place
from tmrun.worker import comm, coverage, fixups, handover, mail, roles, sandbox, stayer
from tmrun.worker.board import Pending
from tmrun.worker.build import Role
from tmrun.worker.link import fence
from tmrun.worker.output import Redirection
from tmrun.worker.process import SETTLED_STEPS, Counters, Process, SoftRestart

_READING_S = 20.0
"""How long the driver may take to tell of the GPU."""


def take_over(process: Process, redirection: Redirection, rehearsed_s: float) -> int:
    """Park until this process is given a rank, and become it; returns the step at which it goes on."""
    replay = process.replay
    assert replay is not None
    live = process.live
    comm.warm((group.kinds for group in live.groups), live.device.torch_device, process.warmed)
    _meet_neighbours(process)
    process.state.gradients.drop_renewed()
    live.device.trim()
    tour = process.tour
    tour.rehearsed(process.rank, rehearsed_s - replay.waited_s)
    if process.rank == tour.home:
        report = coverage.rehearsal(process.rank, tour.longest_s, SETTLED_STEPS, replay, process.meter, live.device.memory())
        report = replace(report, also=tour.also, inside=process.inside)
        process.link.send(
            wire.Warm(coverage.machine(live.device, process.meter.step_s, process.who.local_world, process.gpus(_READING_S)), report)
        )
        tour.told = True
    process.pulse.at(Place.PARKED)
    if (other := tour.next(process.board, process.who)) is not None:
        process.priority.lower()
        raise SoftRestart(other)
    with _watched(process):
        pending, phases = _await_commit(process)
    commit = pending.commit
    assert commit is not None
    redirection.restore()  # before anything can go wrong that people have to see
    process.sandboxed, process.replay, process.recorder = False, None, coverage.FirstStep(replay, live.device)
    process.counters = Counters(SETTLED_STEPS)  # from here on another failure's Prepare is ours to answer, as a stayer
    process.live.publish()
    _name_own_groups(pending)
    phases["switch"] = process.live.install(pending, process.board)
    for model in process.state.ddps:
        sandbox.connect(model)
    began = time.monotonic()
    try:
        received = _receive(process, pending, commit)
        process.live.state_moved()
    except RuntimeError as error:  # whoever sent it is gone: not the script's fault, another joiner may be luckier
        fence(f"rank {process.rank} could not receive its state: {error}")
    phases["state"] = time.monotonic() - began
    os.environ.pop(wire.ENV_REHEARSING, None)
    handover.restart_snapshots(process, commit.target)
    process.pulse.switched()
    process.pace.switched(commit.epoch, redo=False)
    process.link.send(wire.Switched(commit.epoch, commit.target, phases, received, *live.fates(pending)))
    return commit.target


def _meet_neighbours(process: Process) -> None:
    """After the first pass only: where another role takes one of them, the others need not follow."""
    if process.neighbours is not None and not process.tour.told:
        live = process.live
        process.inside = process.neighbours.meet((group.kinds for group in live.groups), live.device.torch_device, live.new_store)


def _watched(process: Process) -> AbstractContextManager[None]:
    """While it waits: the agent hears when its GPU is not what it was."""
    if process.probe is None:
        return nullcontext()
    here, step_s, local_world = process.live.device, process.meter.step_s, process.who.local_world
    return process.probe.watched(lambda health: process.link.send(wire.Measured(coverage.machine(here, step_s, local_world, health))))


def _name_own_groups(pending: Pending) -> None:
    """A group that has only joiners (one machine's share of a mesh) is in nobody's vote, so the committed map cannot name it."""
    assert pending.build is not None
    assert pending.commit is not None
    for name, ranks in pending.build.built.ranks.items():
        if set(ranks) <= set(pending.prepare.ranks):
            pending.commit.comm.setdefault(name, pending.build.plan.id_of(name))


def _receive(process: Process, pending: Pending, commit: wire.Commit) -> int:
    if pending.failure:
        fixups.reset_ddp(process.state.ddps)
        return handover.be_fed(process, pending, commit)
    assert pending.build is not None
    built = pending.build.built
    assert built.transfer is not None
    if built.direct is None:
        return handover.take_all(process, built.transfer.backend, {})
    received = handover.take_all(process, built.transfer.backend, built.direct.backends)
    comm.vacate([built.direct.connection])
    return received


def _await_commit(process: Process) -> tuple[Pending, dict[str, float]]:
    while True:
        process.board.wait(lambda: process.board.newest is not None)
        pending = process.board.newest
        if pending is None:
            continue
        process.priority.restore()
        process.tour.home = pending.prepare.rank
        if pending.prepare.rank != process.rank:
            roles.take(process, pending.prepare.rank)
        process.who.generation = pending.prepare.generation
        bound = time.monotonic()
        pending.build = mail.new_build(process, pending, Role.JOINER).start()
        if not stayer.await_build(process, pending):
            pending.build.drop()
            continue
        phases = {"bind": bound - pending.noticed, "comm": time.monotonic() - bound}
        process.link.send(wire.Prepared(pending.id))
        if stayer.await_decision(process, pending):
            return pending, phases
