"""c10d's counters survive lost answers: every request is carried out exactly once, whoever else counts meanwhile."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tmrun_agent.rendezvous import Rendezvous

from tmrun import wire
from tmrun.core.errors import OutcomeUnknown
from tmrun.core.keys import Keys
from tmrun.core.txn import Txn, TxnResult
from tmrun.store.memory import MemoryStore, MemoryWorld

KEYS = Keys("job")
FATES = (ANSWERED := "answered", "unanswered", LOST := "lost", "late 1", "late 2")
"""late n: it is carried out only before the n-th call after it."""


class Shaky:
    """A client whose commits meet given fates, and who is never alone: before each of its calls, ``others`` do something."""

    def __init__(self, inner: MemoryStore, fates: tuple[str, ...], others: Any) -> None:
        self.inner, self.fates, self.others = inner, list(fates), others
        self.late: list[tuple[int, Txn]] = []

    def get(self, key: str) -> Any:
        self._before()
        return self.inner.get(key)

    def commit(self, txn: Txn) -> TxnResult:
        self._before()
        fate = self.fates.pop(0) if self.fates else ANSWERED
        if fate.startswith("late"):
            self.late.append((int(fate[-1]), txn))
        elif fate != LOST:
            result = self.inner.commit(txn)
        if fate != ANSWERED:
            raise OutcomeUnknown("the answer was lost")
        return result

    def _before(self) -> None:
        due = [txn for n, txn in self.late if n == 1]
        self.late = [(n - 1, txn) for n, txn in self.late if n > 1]
        for txn in due:
            self.inner.commit(txn)
        self.others()


def ask(rendezvous: Rendezvous, op: wire.StoreOp, **more: Any) -> wire.StoreReply:
    reply = rendezvous.serve(wire.StoreRequest(op, ("m1/n",), **more))
    assert not reply.error
    return reply


BUSY: list[set[int]] = [set(), {0}, {1}, {2}, {3}, {1, 3}, {2, 4}, set(range(40))]
"""Before which of its calls somebody else counts too."""


@pytest.mark.parametrize("first", FATES)
def test_every_request_counts_once(first: str) -> None:
    for fates in itertools.product([first], FATES, FATES):
        for busy in BUSY:
            counted = _count(fates, busy)
            assert sorted(counted) == list(range(1, len(counted) + 1)), (fates, busy, counted)


def _count(fates: tuple[str, ...], busy: set[int]) -> list[int]:
    """What everybody was told."""
    world = MemoryWorld()
    healthy = Rendezvous(world.client("b"), KEYS)
    calls, told = itertools.count(), []

    def others() -> None:
        if next(calls) in busy:
            told.append(ask(healthy, wire.StoreOp.ADD, amount=1).number)

    ours = Rendezvous(Shaky(world.client("a"), fates, others), KEYS)  # type: ignore[arg-type]
    told.extend(ask(ours, wire.StoreOp.ADD, amount=1).number for _ in range(2))
    return told


def test_who_set_it_is_told_so() -> None:
    for fates in itertools.product(FATES, FATES):
        world = MemoryWorld()
        shaky = Rendezvous(Shaky(world.client("a"), fates, lambda: None), KEYS)  # type: ignore[arg-type]
        assert ask(shaky, wire.StoreOp.COMPARE_SET, expected="", value="bWluZQ==").value == "bWluZQ==", fates
        again = ask(Rendezvous(world.client("b"), KEYS), wire.StoreOp.COMPARE_SET, expected="", value="eW91cnM=")
        assert again.value == "bWluZQ==", fates
