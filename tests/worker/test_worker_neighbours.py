"""The standby processes of one node use real connections among them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from trials import Trials

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.worker import comm_gloo
from tmrun.worker.neighbours import Neighbours


class Store(HashStore):
    def dispose(self) -> None:
        pass


class Away(Store):
    """Refuses the first calls."""

    refused = 0

    def set(self, key: str, value: Any) -> None:
        if self.refused < 5:
            self.refused += 1
            raise dist.DistStoreError("no quorum")
        super().set(key, value)


class Wrong:
    """A gloo in which one collective gives what it should not."""

    NAME = "gloo"

    def __init__(self, collective: str) -> None:
        self.collective = collective

    def build(self, *args: Any) -> Any:
        backend, connection = comm_gloo.build(*args)
        return Damaged(backend, self.collective), connection


class Damaged:
    def __init__(self, backend: Any, collective: str) -> None:
        self._backend, self._collective = backend, collective

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._backend, name)

        def damage(*args: Any) -> Any:
            work = call(*args)
            work.wait()
            output = args[0][0] if isinstance(args[0], list) else args[0]
            output[-1] += 1
            return SimpleNamespace(wait=lambda: True)

        return damage if name == self._collective else call


def meet(kind: Any, count: int) -> list[dict[str, int]]:
    store = Store()
    with ThreadPoolExecutor(count) as pool:
        meetings = [
            pool.submit(Neighbours("n", i, count).meet, [{"cpu": kind, "cuda": kind}], torch.device("cpu"), lambda: store)  # type: ignore[arg-type, return-value]
            for i in range(count)
        ]
    return [meeting.result() for meeting in meetings]


@pytest.mark.parametrize("count", [2, 3])
def test_they_meet(count: int) -> None:
    before = comm_gloo.open_sockets()
    found = meet(comm_gloo, count)
    assert [each.keys() for each in found] == [{"gloo on cpu"}] * count
    assert min(each["gloo on cpu"] for each in found) > 0
    assert comm_gloo.open_sockets() <= before


@pytest.mark.parametrize("collective", ["allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "broadcast"])
def test_values_that_are_wrong(collective: str) -> None:
    with pytest.raises(WorkerError, match=r"the 2 workers of this node cannot use gloo on cpu among them: an? .* gave .* belong"):
        meet(Wrong(collective), 2)


def test_only_one_has_a_backend_that_the_others_lack() -> None:
    """As rank 0 of a script that makes a group for the first rank of each node."""
    more = Wrong("nothing")
    more.NAME = "other"
    store = Store()
    groups: list[list[Any]] = [[{"cpu": comm_gloo}, {"cpu": more}], [{"cpu": comm_gloo}]]
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(Neighbours("n", i, 2).meet, groups[i], torch.device("cpu"), lambda: store) for i in range(2)]  # type: ignore[arg-type, return-value]
    assert [list(meeting.result()) for meeting in meetings] == [["gloo on cpu"]] * 2


def test_a_store_that_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was rehearsed is not lost for it."""
    monkeypatch.setattr("tmrun.worker.neighbours._LOOK_S", 0.01)
    store = Away()
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(Neighbours("n", i, 2).meet, [{"cpu": comm_gloo}], torch.device("cpu"), lambda: store) for i in range(2)]  # type: ignore[arg-type, return-value]
    assert all(meeting.result()["gloo on cpu"] > 0 for meeting in meetings) and store.refused == 5


def test_two_of_a_node_rehearse(trials: Trials) -> None:
    """Then both of its ranks move to them."""
    job = trials.make("ddp", world=2)
    joiners = {rank: job.standby(rank, **{wire.ENV_NEIGHBOURS: "node.1"}) for rank in (0, 1)}
    for joiner in joiners.values():
        assert job.expect(joiner, wire.Warm).rehearsal.inside["gloo on cpu"] > 0
    job.start()
    job.reach(4)
    job.drain(1, joiners[1])
    job.drain(0, joiners[0])
    trials.same(job)


def test_alone_there_is_nobody_to_meet(trials: Trials) -> None:
    job = trials.make("ddp")
    assert job.expect(job.standby(1), wire.Warm).rehearsal.inside == {}
