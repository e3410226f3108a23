"""What a training script sees: ``join``, ``Run`` and ``Step``.

>>> run = tmrun.join(model=model, optimizer=optimizer, scheduler=scheduler, data=data)   # doctest: +SKIP
>>> for step in run.steps(total):   # doctest: +SKIP
...     with step:
...         train_one_step()

A step either happens everywhere or nowhere: after a crash the block may run again, from the same random state and data position.
Everything that belongs to a step (drawing the batch, forward, backward, the updates of optimizer and scheduler) sits in the block, and
so does all communication (evaluation, a mean loss), best before the update: there it is run again, after the update it is skipped when a
rank is lost, between two blocks it is an error then. The same number may come twice: ``committed`` tells which time it happened. After a
loss that no replica covers, numbers go back to the last copy of the state, and steps that had happened come once more.
Outside tmrun the loop is a plain range with the same checks. May not know: process groups, the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from torch.utils.data import DataLoader

from tmrun.core.errors import WorkerError


class Step(int):
    """A step's number, and the context manager that makes it happen everywhere or nowhere."""

    _engine: Engine
    committed: bool
    """After the block: whether the step happened. False after a crash that undid it; the same number then comes again.

    Where shards have no replica (``snapshot_every``), a step that had happened may be undone later, with all steps since the last copy:
    it comes again, and is committed again, with bitwise the same results. What is written for a step should overwrite, or bear its number.
    """

    def __new__(cls, number: int, engine: Engine) -> Step:
        """Made by ``Run.steps``."""
        step = super().__new__(cls, number)
        step._engine = engine
        step.committed = False
        return step

    def __enter__(self) -> Step:
        self._engine.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        return self._engine.end(self, error)


class Engine(Protocol):
    """What stands behind a Run: the runtime of a tmrun worker, or nothing much."""

    @property
    def rehearsing(self) -> bool:
        """Whether no real peers are connected."""

    def register(self, registered: dict[str, Any], snapshot_every: int | None, on_role: Callable[[int], None] | None) -> None:
        """Take what was joined."""

    def steps(self, total: int) -> Iterator[Step]:
        """The loop."""

    def begin(self, step: Step) -> None:
        """A step's block is entered."""

    def end(self, step: Step, error: BaseException | None) -> bool:
        """A step's block is left; whether the error is dealt with."""


class Run:
    """A joined training run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def rehearsing(self) -> bool:
        """True in a standby that runs the script without peers, to be warm; nothing it writes counts."""
        return self._engine.rehearsing

    def steps(self, total: int) -> Iterator[Step]:
        """Steps 0 to total - 1; use each with ``with step:``. The only place where machines change is between two of them."""
        if total < 0:
            raise WorkerError(f"run.steps({total}): the number of steps cannot be negative")
        return self._engine.steps(int(total))


class Plain:
    """The engine outside tmrun."""

    rehearsing = False

    def __init__(self) -> None:
        self._open: Step | None = None
        self._entered = False

    def register(self, registered: dict[str, Any], snapshot_every: int | None, on_role: Callable[[int], None] | None) -> None:
        """Nothing moves here."""

    def steps(self, total: int) -> Iterator[Step]:
        """A range."""
        for number in range(total):
            self._entered = False
            yield Step(number, self)
            check_entered(self._entered, number)

    def begin(self, step: Step) -> None:
        """Only the checks."""
        if self._open is not None:
            raise WorkerError(f"step {int(step)} begins inside step {int(self._open)}; leave the with block first")
        check_first(self._entered, int(step))
        self._open = step
        self._entered = True

    def end(self, step: Step, error: BaseException | None) -> bool:
        """It happened unless it raised."""
        self._open = None
        step.committed = error is None
        return False


def check_first(entered: bool, number: int) -> None:
    """One block a step. Raises WorkerError."""
    if entered:
        raise WorkerError(f"step {number} is entered twice: one `with step:` block a step, or a redo would do the first one again")


def check_entered(entered: bool, number: int) -> None:
    """Every step must have been used as a context manager."""
    if not entered:
        raise WorkerError(f"step {number} ran outside `with step:`; put everything that belongs to the step inside that block")


def join(*, snapshot_every: int | None = None, on_role: Callable[[int], None] | None = None, **registered: Any) -> Run:
    """Name what a successor of this process needs: modules, optimizers, random number generators, all with a state_dict.

    ``snapshot_every``: where a shard of the state has no replica on another rank, every rank copies its state to another node's memory
    every so many steps. Chosen from measured costs when left out (TMRUN_SNAPSHOT_EVERY sets it from outside).
    ``on_role``: called with the new rank in a standby that takes another rank than the one it rehearsed. It sets anew every variable of the
    script that was made from the rank (the rank itself, a sampler's, a file's name); random states and what was registered are moved
    anyway. With it, where ranks differ in nothing else (DDP over the default group), a standby takes any rank in place; without it, or
    where groups or shards depend on the rank, its script starts again in the warm process.
    """
    from tmrun.worker import rng
    from tmrun.worker.current import HOLDER

    if snapshot_every is not None and snapshot_every < 1:
        raise WorkerError(f"join(snapshot_every={snapshot_every}): at least 1, or leave it out")
    for name, value in registered.items():
        if isinstance(value, DataLoader):
            raise WorkerError(
                f"join({name}=...): give it as tmrun.Batches({name}), and draw from that: a loader cannot move back by itself"
            )
        able = rng.stateful(value)
        if not (callable(getattr(able, "state_dict", None)) and callable(getattr(able, "load_state_dict", None))):
            raise WorkerError(
                f"join({name}=...): a {type(value).__name__} has no state_dict and load_state_dict; give it both or leave it out"
            )
    if HOLDER.refused:
        raise WorkerError(HOLDER.refused)
    if HOLDER.joined:
        raise WorkerError("tmrun.join was called twice; call it once, with everything that has to move")
    HOLDER.joined = True
    engine: Engine = HOLDER.runtime or Plain()
    engine.register(registered, snapshot_every, on_role)
    return Run(engine)
