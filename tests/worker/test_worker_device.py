"""On a device operations are queued: what has to have run before a step is said to be complete, and before it is run again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster

from tmrun.worker import comm, coverage, device, live, shim
from tmrun.worker.groups import Group
from tmrun.worker.live import Live
from tmrun.worker.process import VoteBroken
from tmrun.worker.record import Replay
from tmrun.worker.runtime import Runtime

Make = Callable[..., Cluster]
Same = Callable[..., None]
QUEUED = Path(__file__).with_name("queued.py")


def voter(order: list[str], complete: Callable[[], object]) -> Runtime:
    """As much of a runtime as holds a vote."""
    process = SimpleNamespace(
        live=SimpleNamespace(complete=complete, control=SimpleNamespace(backend=None), lost=False),
        note_hidden=lambda: order.append("asked for failures"),
        board=SimpleNamespace(failure=None, drain=None),
        trouble=None,
        snapshots=SimpleNamespace(held=-1, every=lambda _: 1),
        pace=SimpleNamespace(step_s=0.0),
        pulse=SimpleNamespace(voting=nullcontext),
        ledger=SimpleNamespace(vote=lambda *_: order.append("voted")),
        rank=0,
        who=SimpleNamespace(local_world=1),
        state=None,
    )
    runtime = Runtime.__new__(Runtime)
    runtime._process, runtime._fault = process, None  # type: ignore[assignment]
    return runtime


def test_the_device_has_run_everything_before_anybody_votes() -> None:
    order: list[str] = []
    voter(order, lambda: order.append("synchronized"))._hold_vote(SimpleNamespace(number=3))  # type: ignore[arg-type]
    assert order == ["synchronized", "asked for failures", "voted"]


def test_who_cannot_say_that_it_has_does_not_vote() -> None:
    order: list[str] = []

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(VoteBroken, match="the device failed: CUDA error"):
        voter(order, fail)._hold_vote(SimpleNamespace(number=3))  # type: ignore[arg-type]
    assert order == []


def test_whoever_was_told_to_park_does_not_vote() -> None:
    """Its collectives were skipped, perhaps, though no failure is reported yet; and its control group still takes what it sends."""
    order: list[str] = []
    one = Live(who=SimpleNamespace(rank=0), switching=SimpleNamespace())  # type: ignore[arg-type]
    one._lost = True
    runtime = voter(order, one.complete)
    runtime._process.live = one
    with pytest.raises(VoteBroken):
        runtime._hold_vote(SimpleNamespace(number=3))  # type: ignore[arg-type]
    assert order == ["asked for failures"]


class Broken(device.Cpu):
    def __init__(self, times: int) -> None:
        self.times = times

    def synchronize(self) -> None:
        self.times -= 1
        if self.times >= 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def test_a_device_that_is_lost_for_good_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context is broken: nothing in the process can mend that, another process can. An error that is over is only an error."""
    said: list[str] = []
    monkeypatch.setattr(live, "fence", said.append)
    one = Live(who=SimpleNamespace(rank=4), switching=SimpleNamespace(), device=Broken(1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        one.complete()
    assert said == [] and not one.waits_for_device
    one.device = Broken(1 << 30)
    with pytest.raises(RuntimeError):
        one.complete()
    assert said == ["rank 4 has lost its device: CUDA error: an illegal memory access was encountered"]


def test_what_was_aborted_does_not_count_as_complete() -> None:
    completed: list[bool] = []
    one = Live(who=SimpleNamespace(rank=0), switching=SimpleNamespace())  # type: ignore[arg-type]
    one.groups.complete = lambda: completed.append(True)  # type: ignore[method-assign]
    one.complete()
    one._lost = True
    one.complete()
    assert completed == [True]


def test_where_the_tensors_are() -> None:
    assert type(device.of([])) is type(device.of([torch.ones(1)])) is device.Cpu
    gpu: Any = SimpleNamespace(device=torch.device("cuda", 3))
    found = device.of([torch.ones(1), gpu])
    assert found.torch_device == torch.device("cuda", 3)


def test_where_collectives_are_queued_though_the_state_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 keeps it there between its uses (``CPUOffloadPolicy``)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert device.of([torch.ones(1)], {"cuda"}).torch_device == torch.device("cuda", 2)
    assert type(device.of([torch.ones(1)], {"cpu"})) is device.Cpu
    assert type(device.of([torch.ones(1)])) is device.Cpu, "a job on the CPU leaves the GPU alone"


def group(world: int, new: Any) -> tuple[Live, Any, Any]:
    """A process with one group that was just given a communicator, over which its state is to move."""
    switch = SimpleNamespace(idle=(0,), install=lambda _: None)
    one = Live(who=SimpleNamespace(rank=0, world=2), switching=SimpleNamespace(fail=lambda on: None, abandon=lambda: None))  # type: ignore[arg-type]
    managed = Group(
        "0", dist.ProcessGroup(0, world), tuple(range(world)), timedelta(1), switch, comm.kinds_of("0", "cpu:nccl"), Connection()
    )  # type: ignore[arg-type]
    one.groups.add(managed)
    one.groups.install({"0": new}, 1)
    one.direct = one._direct(SimpleNamespace(groups={"0": new}))  # type: ignore[arg-type]
    return one, managed, new.connection


class Connection:
    certain, on_device, aborts = True, True, 0

    def abort(self) -> int:
        self.aborts += 1
        return 1

    def quiet(self) -> bool:
        return True


def test_what_a_state_moves_over_is_cut_when_another_rank_is_lost() -> None:
    """The switch counts nothing of it, so it looks idle."""
    one, managed, connection = group(2, comm.Communicator({"cpu": None}, Connection()))  # type: ignore[dict-item]
    assert managed.idle is None and one.waits_for_device
    one.abort()
    assert connection.aborts == 1
    one, managed, connection = group(2, comm.Communicator({"cpu": None}, Connection()))  # type: ignore[dict-item]
    one.state_moved()
    assert managed.idle == (0,) and not one.waits_for_device
    one.abort()
    assert connection.aborts == 0


class Taking(device.Cpu):
    def __init__(self, *megabytes: int) -> None:
        self._bytes = iter(megabytes)

    def taken(self) -> int:
        return next(self._bytes) << 20


def test_what_a_switch_and_a_state_take_is_not_the_first_steps() -> None:
    """The step may begin twice, when another rank is lost in it."""
    here = Taking(700, 1000)
    listener = coverage.FirstStep(Replay(lambda: None), here)
    listener.begin_step()
    listener.begin_step()
    assert listener.cold() == {"MB of memory": 300}


def test_what_was_given_back_and_taken_anew_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stats(where: Any) -> dict[str, int]:
        asked.append(where)
        return {"reserved_bytes.all.peak": 5 << 20, "reserved_bytes.all.current": 3 << 20, "reserved_bytes.all.allocated": 9 << 20}

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    assert device.Cuda(3).taken() == 9 << 20 and asked == [torch.device("cuda", 3)]


def test_a_standby_says_what_it_waits_with() -> None:
    report = coverage.rehearsal(2, 1.0, 3, Replay(lambda: None), coverage.Meter(), device.Memory(900, 1000, 1600))
    assert report.waiting_mb == {"tensors": 900, "kept": 1000, "device": 1600}
    assert coverage.rehearsal(2, 1.0, 3, Replay(lambda: None), coverage.Meter(), device.Cpu().memory()).waiting_mb == {}


@pytest.mark.parametrize("how", ["slot", pytest.param("shim", marks=pytest.mark.skipif(shim.load() is None, reason="not built"))])
def test_garbage_that_says_nothing_reaches_no_parameter(cluster: Make, same: Same, how: str) -> None:
    """Rank 1 dies right after it voted, while rank 0's reduction may still run; then a death in the middle, told by an error or not."""
    environment = {"TMRUN_SWITCH": how, "TEST_LAG_S": "0.2", "TMRUN_TEST_KILL": "1:6:after_vote,0:12:backward"}
    job = cluster(2, QUEUED, **environment, **({"TEST_LOUD": "1", "STAND_IN": "cpu:nccl"} if how == "shim" else {}))
    first, second = job.standby(1), job.standby(0)
    job.start()
    job.died(1)
    assert job.heal({1: first}) == 7
    job.died(0)
    assert job.heal({0: second}) == 12
    same(job, unlogged=((1, 6), (0, 12)))
