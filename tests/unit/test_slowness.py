"""What the coordinator does about a slow node: told once, drained when that can be done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from test_core import KEYS, SPEC, member, running
from tmrun_agent import slowness

from tmrun.core.codec import encode
from tmrun.core.membership import Job
from tmrun.core.model import Host, Progress
from tmrun.core.straggler import IN_A_ROW
from tmrun.core.txn import Put, Txn
from tmrun.store.memory import MemoryWorld


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call is long after the last one."""
    times = iter(range(0, 1 << 20, 100))
    monkeypatch.setattr(slowness.time, "monotonic", lambda: float(next(times)))
    yield


class Looks:
    """A coordinator that looks at two nodes, the second one three times as slow."""

    def __init__(self) -> None:
        self.store = MemoryWorld().client()
        self.told: list[str] = []
        self.asked: list[Txn] = []
        self.eye = slowness.Slowness(self.store, self.told.append, lambda txn: self.asked.append(txn) or True)  # type: ignore[func-returns-value]
        self.count = 0

    def look(self, job: Job) -> None:
        self.count += 1  # a new measurement each time
        for host, busy in (("a", 1.0), ("b", 3.0 + self.count / 1000)):
            told = Progress(Host(host), 10, 0.5, 0.0, busy, 1)
            self.store.commit(Txn((), (Put(KEYS.progress(host), encode(told)),), "progress"))
        self.eye.look(job)


def policy(name: str, *, warm: bool) -> Job:
    spec = (KEYS.spec, replace(SPEC, straggler=name))
    return running(spec, (KEYS.member("s"), member("s", warm=warm)))


def test_drained_though_no_standby_was_warm_when_it_was_found() -> None:
    looks = Looks()
    for _ in range(IN_A_ROW + 2):
        looks.look(policy("drain", warm=False))
    assert looks.told == ["b is slow: it computes 3.00 times as long as the others"]
    assert not looks.asked
    looks.look(policy("drain", warm=True))
    assert [txn.name for txn in looks.asked] == ["request drain slow-1-b"]
    assert len(looks.told) == 1


@pytest.mark.parametrize(("name", "told"), [("notify", 1), ("off", 0)])
def test_nobody_is_drained_unasked(name: str, told: int) -> None:
    looks = Looks()
    for _ in range(IN_A_ROW + 2):
        looks.look(policy(name, warm=True))
    assert (len(looks.told), looks.asked) == (told, [])
