"""A process without a rank: it rehearsed one, waits parked, and takes a rank over.

    parked --Prepare(my rank)--> building --> Prepared --Commit--> groups installed --> state received --> live, at ``target``
      |  ^--------------------------Abort, or a newer Prepare--'
      '--Prepare(another rank)--> SoftRestart: the script runs again as that rank; the Prepare waits on the board
May not know: the live ranks' steps.
"""

from __future__ import annotations

import os
import time

from tmrun import wire
from tmrun.worker import fixups, handover, mail, sandbox, stayer
from tmrun.worker.board import Pending
from tmrun.worker.build import Role
from tmrun.worker.output import Redirection
from tmrun.worker.process import Process, SoftRestart


def take_over(process: Process, redirection: Redirection, rehearsed_s: float) -> int:
    """Park until this process is given a rank, and become it; returns the step at which it goes on."""
    process.link.send(wire.Warm(process.rank, rehearsed_s))
    pending, phases = _await_commit(process)
    commit = pending.commit
    assert commit is not None
    process.sandboxed = False
    process.live.publish()
    process.state.drop_gradients()
    phases["switch"] = process.live.install(pending, process.board)
    for model in process.state.ddps:
        sandbox.connect(model)
    began = time.monotonic()
    if pending.failure:
        fixups.reset_ddp(process.state.ddps)
        received = handover.be_fed(process, commit)
    else:
        assert pending.build is not None
        assert pending.build.built.transfer is not None
        received = handover.take_all(process, pending.build.built.transfer.backend)
    phases["state"] = time.monotonic() - began
    os.environ.pop(wire.ENV_REHEARSING, None)
    redirection.restore()
    process.pace.switched(commit.epoch, redo=False)
    process.link.send(wire.Switched(commit.epoch, commit.target, phases, received))
    return commit.target


def _await_commit(process: Process) -> tuple[Pending, dict[str, float]]:
    while True:
        process.board.wait(lambda: process.board.newest is not None)
        pending = process.board.newest
        if pending is None:
            continue
        if pending.prepare.rank != process.rank:
            raise SoftRestart(pending.prepare.rank)
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
