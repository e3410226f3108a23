"""One training process under tmrun: the loop, the step, the vote.

    active:   BOOT --init_process_group--> READY --run.steps--> LOOP --total reached--> DONE
    standby:  BOOT --> READY --> LOOP (rehearses three steps) --> parked --Commit--> LOOP (as its rank, live)
                   ^----------- SoftRestart: needed as another rank -----------'

The *main* thread runs the script and does everything that changes groups or state; the *link* thread (``mail``) posts what the agent says
on the board, and in a failure cuts the live connections so that a blocked main thread comes back at once.

Inside a step, what a lost connection means depends on the vote:

    before the vote passed, an error unwinds the block -> ``end`` parks, then redoes the step
    in the vote            -> parks right there, for the answer may be that somebody passed:
                              target = step + 1: *late commit*: groups are poisoned (collectives become no-ops), the update runs, the real
                                                 groups come at the next boundary
                              target = step:     ``StepLost`` unwinds the block, ``end`` redoes
    after the vote passed  -> the collective becomes a no-op (``collective``), the block finishes, the next boundary parks

What the script runs between two blocks it runs once: nobody can make a successor, which begins with a block, take part in it. So a
collective there that meets a failure is an error that says what to change; everything else there is done before the boundary.

Between steps (``_boundary``): first a drain's agreed stop step, then a failure, then the end of the loop.
May not know: etcd, who decides, other machines.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from tmrun import wire
from tmrun.beacon import ENV_BEACON
from tmrun.core.errors import WorkerError
from tmrun.core.watchdog import Place
from tmrun.worker import (
    compiled,
    coverage,
    device,
    faults,
    fixups,
    gpu_health,
    handover,
    identity,
    mail,
    neighbours,
    pulse,
    record,
    sandbox,
    snapshot,
    standby,
    stayer,
    suspects,
    vote,
)
from tmrun.worker.api import Step, check_entered, check_first
from tmrun.worker.board import Pending
from tmrun.worker.comm import Making
from tmrun.worker.comm_gloo import BUILD_TIMEOUT
from tmrun.worker.link import Link
from tmrun.worker.live import Live, Made
from tmrun.worker.output import Redirection
from tmrun.worker.process import SETTLED_STEPS, Phase, Process, SoftRestart, StepLost, VoteBroken
from tmrun.worker.state import Snapshot
from tmrun.worker.tail import Tail, half_step

_MEASURED_STEPS = 8
"""Steps after which a live rank says what it runs on and how long a step takes."""
_UNSKIPPABLE = "it communicated at a place that cannot be skipped (an asynchronous collective, or one inside optimizer.step())"
_LEAD = 2
"""Steps between an agreement to stop and the stop, so that the control plane decides while training goes on."""


@dataclass
class _InStep:
    """The step whose block is open."""

    number: int
    snapshot: Snapshot | None
    groups: Collection[str] = ()
    """Names of the groups that there were when it began."""
    tail: Tail | None = None
    """Once its vote passed."""
    late: Pending | None = None
    lost: Pending | None = None
    group_count: int = field(default_factory=lambda: int(c10d._world.group_count))

    @property
    def voted(self) -> bool:
        """Whether the step counts."""
        return self.tail is not None


def from_environment() -> Runtime:
    """The runtime of a process that an agent spawned."""
    who = identity.from_environment()
    process = Process(who, Link(who.socket, who.local_rank), Live(who), who.standby, pulse.from_environment())
    process.neighbours = neighbours.from_environment(who)
    return Runtime(process)


class Runtime:
    """See the module's text; implements ``api.Engine`` and what ``intercept`` reports to."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._redirection = Redirection(process.who.rehearsal_log)
        self._fault = None if process.who.standby else faults.from_environment(process.rank)
        self._started = time.monotonic()
        self._open: _InStep | None = None
        self._entered = False
        self._next = 0
        self._stop: stayer.Stop | None = None
        self._late: Pending | None = None
        self._left_early = False
        self._raised = False
        """The script's own error leaves the loop: the end of this process tells of it."""

    # -- life -----------------------------------------------------------------------------------------------------------------------
    @property
    def rank(self) -> int:
        """Our rank, rehearsed or real."""
        return self._process.rank

    @property
    def world(self) -> int:
        """Number of ranks; never changes."""
        return self._process.world

    @property
    def sandboxed(self) -> bool:
        """Whether process groups are stand-ins."""
        return self._process.sandboxed

    @property
    def rehearsing(self) -> bool:
        """For ``Run.rehearsing``."""
        return self._process.sandboxed

    def start(self) -> None:
        """Begin to listen to the agent; a standby's output goes to its file from here."""
        if self.sandboxed:
            os.environ[wire.ENV_REHEARSING] = "1"
            self._process.priority.lower()
            self._redirection.start()
        self._prepare_tape()
        self._process.pulse.start(os.environ.get(ENV_BEACON))
        self._process.link.start(partial(mail.deliver, self._process))
        if compiled.shared():
            compiled.take(self._process.live.new_store)

    def _prepare_tape(self) -> None:
        process, who = self._process, self._process.who
        if self.sandboxed:
            process.meter = coverage.Meter()
            process.replay = record.Replay(partial(record.fetch, process.live.new_store, who.generation, who.rank))
        elif who.epoch == who.generation and record.largest():
            process.recorder = record.Recorder()

    def become(self, rank: int) -> None:
        """Soft restart: forget the rehearsed run, keep the warm process."""
        self._process.who.become(rank)
        self._process.tour.begin(rank)
        self._process.pulse.at(Place.BOOT)
        compiled.forget()
        if dist.is_initialized():
            dist.destroy_process_group()
        c10d._world.group_count = 0
        self._process.live.clear()
        self._process.state.clear()
        self._process.snapshots.stop()
        self._process.phase, self._open, self._started = Phase.BOOT, None, time.monotonic()
        self._prepare_tape()

    def way_back(self) -> int | None:
        """The script ended by itself. As which rank it is to run again, if it only rehearsed another role."""
        return self._process.tour.way_back(self.rank) if self.sandboxed else None

    def _answer_call(self) -> None:
        """A rehearsal of another rank is given up for the rank that this process is called for; a thread of the script's own cannot."""
        process = self._process
        if threading.current_thread() is not threading.main_thread():
            return
        if process.tour.told and process.board.newest is not None:
            process.priority.restore()
        if (rank := process.tour.called(process.board, process.rank)) is not None:
            raise SoftRestart(rank)

    # -- what interceptions report --------------------------------------------------------------------------------------------------
    def open_base_store(self) -> Store:
        """The store for init_process_group."""
        return self._process.live.base_store(private=self.sandboxed)

    def initialised(self, again: Callable[[], None]) -> None:
        """init_process_group returned; ``again`` calls it with the same arguments."""
        self._process.initialise_again = again
        if not self.sandboxed:
            self._process.live.connect_control(self._process.peers_of(self.rank))
        self._process.phase = Phase.READY

    def making_group(self, name: str = "", backend: Any = "gloo") -> AbstractContextManager[Making]:
        """Around the construction of a process group."""
        return self._process.live.making(name, backend)

    def scoped(self, store: Any) -> Any:
        """Where a process group finds its members."""
        return store if self.sandboxed else self._process.live.scoped(store)

    def patience(self, timeout: timedelta) -> timedelta:
        """How long the construction of a group may wait: in the loop only as long as the construction of a communicator."""
        return min(timeout, BUILD_TIMEOUT) if self._process.phase is Phase.LOOP else timeout

    def add_group(self, made: Made, making: Making) -> None:
        """User code made a process group."""
        self._process.live.add(made, making, fake=self.sandboxed)
        self.set_timeout(made.pg, made.timeout)

    def set_timeout(self, pg: dist.ProcessGroup, timeout: timedelta) -> bool:
        """User code gave a group another timeout; whether it is one of ours."""
        return not self.sandboxed and self._process.live.set_timeout(pg, timeout)

    @property
    def calls(self) -> int:
        """How often groups were told to communicate."""
        return self._process.live.called

    def remove_group(self, pg: dist.ProcessGroup | None) -> None:
        """User code destroys a process group; None: all of them."""
        self._process.live.remove(pg)

    def add_ddp(self, model: DistributedDataParallel) -> None:
        """User code made a DDP instance."""
        self._process.state.ddps.append(model)
        pulse.sample_ddp(model)
        if self.sandboxed and self._process.live.switching.needs_stand_in:
            sandbox.isolate(model)

    def register(self, registered: dict[str, Any], snapshot_every: int | None, on_role: Callable[[int], None] | None) -> None:
        """What ``tmrun.join`` was given."""
        self._process.state.register(registered)
        self._process.on_role = on_role
        self._process.snapshots.configured = snapshot_every or snapshot.every_from_environment()

    # -- the loop -------------------------------------------------------------------------------------------------------------------
    def steps(self, total: int) -> Iterator[Step]:
        """Behind ``Run.steps``."""
        process = self._process
        if process.phase is not Phase.READY:
            hint = "call init_process_group first" if process.phase is Phase.BOOT else "one loop a script"
            raise WorkerError(f"run.steps() {process.phase.value}: {hint}")
        process.state.encoded_objects()  # complain now about what cannot travel, not in a crash
        process.total, process.phase = total, Phase.LOOP
        process.live.device = here = device.of(
            (t for owned in process.state.tensors().values() for t in owned.values()), process.live.queues
        )
        if here.torch_device.type == "cuda" and process.probe is None:
            process.probe = gpu_health.Probe(here.torch_device.index).start()
        process.snapshots.place(process.rank, process.world, process.who.local_world)
        if not self.sandboxed and process.rank == 0:
            self._warn_of_suspects()
        number = 0
        if self.sandboxed:
            fixups.rehearse_pipelines(lambda: self.sandboxed)
            for rehearsed in range(SETTLED_STEPS):
                yield from self._one(rehearsed)
            number = standby.take_over(process, self._redirection, time.monotonic() - self._started)
        process.link.send(wire.Joined(total))
        yield from self._loop(number, total)

    def _warn_of_suspects(self) -> None:
        found = suspects.find(self._process.state, suspects.script_variables(sys._getframe(2)))
        if found:
            print(f"tmrun: not given to tmrun.join, so lost when a rank moves: {', '.join(found)}", file=sys.stderr, flush=True)

    def _loop(self, number: int, total: int) -> Iterator[Step]:
        try:
            while (number := self._boundary(number)) < total:
                yield from self._one(number)
                number = self._next
        except GeneratorExit:  # the script left the loop, perhaps by an error
            self._left_early = True
            self._process.link.send(wire.Finished(number + 1))
            raise
        finally:
            self._process.phase = Phase.DONE
            self._process.pulse.at(Place.BETWEEN if self._raised else Place.DONE)
        self._process.link.send(wire.Finished(total))

    def _one(self, number: int) -> Iterator[Step]:
        self._entered = False
        yield Step(number, self)
        check_entered(self._entered, number)

    def _boundary(self, number: int) -> int:
        """Everything that may happen before step ``number``; returns it."""
        process = self._process
        while True:
            process.note_hidden()
            if self._late is not None:
                pending, self._late = self._late, None
                stayer.carry_out(process, pending, None)
            elif self._stop is not None and self._stop.step <= number:
                pending, self._stop = self._stop.pending, None
                process.live.complete()
                process.live.settle()
                stayer.stop_here(process, pending, number)
            elif process.trouble is not None or process.board.failure is not None:
                pending = self._park(number)
                if target_of(pending) != number and not rolls_back(pending):
                    raise WorkerError(f"told to go on at step {target_of(pending)}, but this rank is at step {number}")
                stayer.carry_out(process, pending, None)
                number = target_of(pending)
            else:
                break
        if process.snapshots.is_due(number):
            process.live.complete()
            handover.take_snapshot(process, number)
        return number

    # -- the step -------------------------------------------------------------------------------------------------------------------
    def begin(self, step: Step) -> None:
        """A step's block is entered."""
        if self._open is not None:
            raise WorkerError(f"step {int(step)} begins inside step {self._open.number}; leave the with block first")
        check_first(self._entered, int(step))
        self._entered, self._next = True, int(step) + 1
        if self.sandboxed:
            self._answer_call()
            self._process.state.gradients.begin()
        snapshot = None if self.sandboxed else self._process.state.snapshot()
        self._open = _InStep(int(step), snapshot, self._process.live.groups.names)
        self._process.live.arm(True)
        tape = self._process.replay or self._process.recorder
        if tape is not None:
            tape.begin_step()
        if self.sandboxed:
            self._process.meter.begin(self._process.live.device)
        else:
            self._process.pace.begin()
            self._process.pulse.begin(self._process.who.epoch, int(step), self._process.live.groups, self._process.world)
            if self._process.pace.due():
                self._process.report_progress(int(step))

    def end(self, step: Step, error: BaseException | None) -> bool:
        """A step's block is left; whether the error is dealt with."""
        current = self._open
        assert current is not None, int(step)
        try:
            if self.sandboxed:
                self._process.meter.end(self._process.live.device)
                return False
            if error is None and not current.voted:
                error = self._vote_at_the_end(current)
            handled = self._settle(current, error)
        finally:
            self._open = None
            self._process.live.arm(False)
            if not self.sandboxed:
                self._process.pulse.at(Place.BETWEEN)
        self._raised = error is not None and not handled
        step.committed = current.voted and error is None
        if step.committed and current.late is None:
            self._count(current.number)
        return handled

    def _vote_at_the_end(self, current: _InStep) -> BaseException | None:
        """A step without an optimizer votes when its block ends, unless its vote was lost and the script kept that to itself."""
        try:
            if current.lost is None:
                self._vote(current)
        except StepLost as lost:
            return lost
        return None

    def _settle(self, current: _InStep, error: BaseException | None) -> bool:
        """Carry out what was decided, or find out what is. Whether ``error`` is dealt with."""
        if current.lost is not None:
            self._undo(current.lost, current)
            return True
        if current.tail is not None and error is None:
            current.tail.end()
        if current.late is not None and error is None:
            self._count(current.number)  # before the switch, which starts to wait for the first step *after* it
            self._late = current.late
            return False
        if error is None or not (current.late or self._process.is_communication(error)):
            return False
        if current.voted:
            raise half_step(current.number, _UNSKIPPABLE) from error
        self._process.note_trouble(error)
        self._undo(self._park(current.number), current)
        return True

    def _undo(self, pending: Pending, current: _InStep) -> None:
        if target_of(pending) != current.number and not rolls_back(pending):
            raise WorkerError(f"told to go on at step {target_of(pending)}, but step {current.number} broke off before its vote")
        self._next = target_of(pending)
        self._process.live.undo_groups(current.groups.__contains__, f"step {current.number}")
        c10d._world.group_count = current.group_count
        stayer.carry_out(self._process, pending, current.snapshot)

    def _park(self, step: int) -> Pending:
        self._stop = None
        return stayer.park(self._process, step)

    def _count(self, number: int) -> None:
        process = self._process
        cold = self._first_step_done() if process.recorder is not None else {}
        process.counters.done += 1
        process.counters.since_reset += 1
        process.pulse.done(process.state.ddps)
        resumed = process.pace.end()
        if resumed is not None:
            epoch, redo_s, pause_s = resumed
            process.link.send(wire.Resumed(epoch, number, redo_s, pause_s, cold))
        if process.counters.done == _MEASURED_STEPS:
            if compiled.shared():
                compiled.give(process.live.new_store, record.role_of(process.state.layout()))
            process.link.send(
                wire.Measured(coverage.machine(process.live.device, process.pace.step_s, process.who.local_world, process.gpus(0)))
            )

    def _first_step_done(self) -> dict[str, int]:
        """Nobody listens to collectives from here on. What was cold in a joiner's first step."""
        process = self._process
        listener, process.recorder = process.recorder, None
        if isinstance(listener, coverage.FirstStep):
            return listener.cold()
        if listener is not None:
            who, role = process.who, record.role_of(process.state.layout())
            record.publish(process.live.new_store, who.generation, who.rank, role, listener.tape)
        return {}

    # -- the vote -------------------------------------------------------------------------------------------------------------------
    def before_backward(self) -> None:
        """Gradients are about to be made."""
        if self._open is not None and not self.sandboxed:
            self._process.state.gradients.before_backward()

    def before_update(self, optimizer: torch.optim.Optimizer | None = None, *, closure: bool = False) -> None:
        """An optimizer is about to update, perhaps with a closure that makes its gradients; the first one in a step votes."""
        if self._open is not None and optimizer is not None and not suspects.steps_for(self._process.state, optimizer):
            raise WorkerError(
                f"a {type(optimizer).__name__} that tmrun.join was not given updates in step {self._open.number}; "
                "its state would be lost when this rank moves, so give it to join as well"
            )
        if self._open is None or self.sandboxed:
            return
        if optimizer is not None:
            self._process.state.gradients.before_update(optimizer, closure=closure)
        if self._open.tail is None:
            self._vote(self._open)
        else:
            self._open.tail.update()

    def after_update(self) -> None:
        """An optimizer updated."""
        if self._fault is not None and self._open is not None:
            self._fault(self._open.number, "in_optimizer")
        if self._open is not None and self._open.tail is not None:
            self._open.tail.update()

    def _vote(self, current: _InStep) -> None:
        if self._fault is not None:
            self._fault(current.number, "before_vote")
        try:
            tally = self._hold_vote(current)
        except RuntimeError as error:
            if not self._process.is_communication(error):
                raise
            self._process.note_trouble(error)
            self._lose(current)
            return
        current.tail = Tail(self._process, current.number)
        self._process.snapshots.agree(tally, self._process.ledger.signatures)
        if self._fault is not None:
            self._fault(current.number, "after_vote")
        self._agree(current, tally)

    def _hold_vote(self, current: _InStep) -> vote.Tally:
        process = self._process
        try:
            process.live.complete()  # before the questions: an abort ends what is queued, with garbage and without an error
        except RuntimeError as error:
            raise VoteBroken(f"the device failed: {error}") from error
        process.note_hidden()
        if process.board.failure is not None or process.trouble is not None or process.live.lost:
            raise VoteBroken("a failure was noticed before the vote")
        drain = process.board.drain
        ready = drain.id if drain is not None and drain.ready and process.counters.since_reset >= SETTLED_STEPS else 0
        snapshots = process.snapshots
        ballot = vote.Ballot(current.number, ready=ready, held=snapshots.held, every=snapshots.every(process.pace.step_s))
        assert process.live.control is not None
        place = (process.rank, process.who.local_world)
        with process.pulse.voting():
            tally = process.ledger.vote(process.live.control, place, process.state, ballot)
        if self._fault is not None and self._fault(current.number, "lose_vote"):
            process.board.wait(lambda: process.board.failure is not None, 60)
            raise VoteBroken("lost on purpose")
        return tally

    def _agree(self, current: _InStep, tally: vote.Tally) -> None:
        """All ranks see the same tally: if everyone is ready for a drain, everyone knows where to stop for it."""
        drain = self._process.board.drain
        known = self._stop is not None and self._stop.pending is drain
        if drain is None or drain.build is None or known or not tally.agreed(drain.id):
            return
        self._stop = stayer.Stop(drain, min(current.number + _LEAD, self._process.total))
        self._process.link.send(wire.Prepared(drain.id, stop_step=self._stop.step, groups=drain.build.built.ranks))

    def _lose(self, current: _InStep) -> None:
        """The vote broke: somebody may have passed it all the same, which the control plane finds out."""
        pending = self._park(current.number)
        if target_of(pending) == current.number or rolls_back(pending):
            current.lost = pending
            raise StepLost
        self._process.ledger.passed_unseen()
        self._process.live.poison()
        current.tail, current.late = Tail(self._process, current.number), pending

    # -- errors in collectives ------------------------------------------------------------------------------------------------------
    @property
    def in_tail(self) -> bool:
        """Whether the open step's vote passed: whatever happens, the rest of its block has to run."""
        return self._open is not None and self._open.voted and not self.sandboxed

    def collective(self, original: Callable[..., Any], stand_in: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """Any collective of the script. An error before the vote is remembered: a script that swallows it cannot vote all the same."""
        live, tail = self._process.live, self._open.tail if self._open is not None else None
        if live.groups.closed:
            live.groups.refuse_closed(args, kwargs)
        if live.groups.poisoned and self._between_steps:
            raise _between(dist.DistBackendError("Connection closed: a rank was lost"))
        if not (self.sandboxed or live.groups.poisoned or (self._open is not None and live.failing)):
            try:
                with self._process.pulse.waiting():
                    heard = partial(self._heard, original, args, kwargs)
                    return heard() if tail is None else tail.collective(original, heard, args, kwargs)
            except RuntimeError as error:
                if self._between_steps and self._process.is_communication(error):
                    raise _between(error) from error
                if not self._is_skipped(error):
                    raise
        if tail is not None:
            tail.skip(args, kwargs)
        if self._process.replay is not None:
            self._answer_call()
            return self._process.replay.run(original, stand_in, args, kwargs)
        return (stand_in or original)(*args, **kwargs)

    def _is_skipped(self, error: RuntimeError) -> bool:
        """Remember an error that a lost rank caused in a step; whether the rest of the step does without communication."""
        if self._open is None or not self._process.is_communication(error):
            return False
        self._process.note_trouble(error)
        if self.in_tail:
            self._process.live.poison()
        return self.in_tail

    def functional(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A functional collective of the script, or of DTensor."""
        process = self._process
        if process.replay is not None:
            self._answer_call()
            return process.replay.run(original, None, args, kwargs)
        if self._open is None or self._open.tail is None:
            return self._heard(original, args, kwargs)
        if process.live.groups.poisoned:
            self._open.tail.skip()
        return self._open.tail.collective(original, partial(self._heard, original, args, kwargs), args, kwargs)

    def _heard(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recorder = self._process.recorder
        return original(*args, **kwargs) if recorder is None else recorder.run(original, args, kwargs)

    @property
    def _between_steps(self) -> bool:
        """Whether the script is in its loop, outside a step's block."""
        return self._open is None and self._process.phase is Phase.LOOP and not self.sandboxed

    def explain(self, error: BaseException) -> str:
        """What to change, for an error that ends the script and did not come through ``collective``; empty if it explains itself."""
        between = self._open is None and (self._left_early or self._between_steps)
        return str(_between(error)) if between and self._process.is_communication(error) else ""


def target_of(pending: Pending) -> int:
    """The step at which a committed migration goes on."""
    assert pending.commit is not None, pending
    return pending.commit.target


def rolls_back(pending: Pending) -> bool:
    """Whether a committed migration goes back to a snapshot."""
    return pending.commit is not None and pending.commit.rollback


def _between(error: BaseException) -> WorkerError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return WorkerError(
        f"a rank was lost while the script communicated between two steps ({first[:120]}). A successor takes part in steps only: move this "
        "communication into the `with step:` block, before optimizer.step(), where it is run again"
    )
