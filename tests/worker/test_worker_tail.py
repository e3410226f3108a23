"""A rank is lost after a step counted, and the rest of the step needs it: nothing may go on with what was not communicated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from cluster import DEADLINE_S, Cluster
from nursery import Nursery
from torch._C._distributed_c10d import HashStore
from trials import STEP as TRIED
from trials import Trials

from tmrun import wire
from tmrun.worker import values
from tmrun.worker.groups import ENV_SWITCH
from tmrun.worker.shim import load
from tmrun.worker.tail import Tail

Make = Callable[[str, int, str], Cluster]
SCRIPT = Path(__file__).with_name("tails.py")
STEP = 5
REFUSED = {
    "backward": "an optimizer updates with what was not communicated",
    "closure": "an optimizer updates with what was not communicated",
    "given": "a collective on parameters was skipped",
    "by_hand": "parameters were changed after a collective that was skipped",
    "copied": "parameters were changed after a collective that was skipped",
    "waited_for": "parameters were changed after a collective that was skipped",
    "flattened": "parameters were changed after a collective that was skipped",
}
IN_BACKWARD = ("backward", "closure")
TWICE = "communicates after its first optimizer.step() and updates again"


@pytest.fixture(params=["slot", "shim"])
def make(request: pytest.FixtureRequest, tmp_path: Path, nursery: Nursery) -> Iterator[Make]:
    if request.param == "shim" and load() is None:
        pytest.skip("the C++ switch is not built")
    made: list[Cluster] = []

    def cluster(how: str, world: int, kill: str) -> Cluster:
        environment = {ENV_SWITCH: request.param, "TEST_TAIL_OF": how, "TMRUN_TEST_KILL": kill}
        if world == 3:  # rank 2 has to live, to tell that the step counts
            environment["TEST_QUIET"] = f"2:{STEP}"
        made.append(Cluster(tmp_path, world, ["--steps", "9"], environment, SCRIPT))
        made[-1].nursery = nursery
        return made[-1]

    yield cluster
    for job in made:
        job.close()


@pytest.mark.parametrize("how", REFUSED)
def test_it_is_refused(make: Make, how: str) -> None:
    job = make(how, 2, f"1:{STEP}:between_updates")
    job.start(at_once=True)
    job.died(1)
    survivor = job.ranks[0]
    with contextlib.suppress(OSError):  # it may have ended by itself
        survivor.channel.send(wire.Prepare(1, wire.Kind.FAILURE, 2, (1,), 0, 1))
    assert survivor.process.wait(DEADLINE_S) == 1, job.output()
    output = job.output()
    assert f"a rank was lost in step {STEP} after its optimizer had begun to update" in output, output
    assert told(how, output), output
    assert output.count(TWICE) == (how in IN_BACKWARD), output
    assert f"committed {STEP}" not in output


@pytest.mark.parametrize("how", REFUSED)
def test_it_is_refused_when_the_vote_was_lost(make: Make, how: str) -> None:
    """It learns that the step counts when nobody can be asked any more; another survivor has gone on."""
    job = make(how, 3, f"1:{STEP}:after_vote,0:{STEP}:lose_vote")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    job.conclude(job.prepare(wire.Kind.FAILURE, {1: joiner}), {1: joiner}, seat=False)
    assert job.ranks[0].process.wait(DEADLINE_S) == 1, job.output()
    assert told(how, job.output()), job.output()


def told(how: str, output: str) -> bool:
    return REFUSED[how] in output or (how in IN_BACKWARD and "at a place that cannot be skipped" in output)


@pytest.mark.parametrize("how", ["nothing", "printed"])
@pytest.mark.parametrize("lost", [False, True])
def test_what_does_not_need_it_goes_on(make: Make, how: str, lost: bool) -> None:
    job = make(how, 3, f"1:{STEP}:after_vote,0:{STEP}:lose_vote") if lost else make(how, 2, f"1:{STEP}:between_updates")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == STEP + 1
    for worker in job.ranks.values():
        assert worker.process.wait(DEADLINE_S) == 0, job.output()
    output = job.output()
    assert ("what it reports there is not valid" in output) == (how == "printed"), output
    assert (TWICE in output) == (how == "printed")


@pytest.mark.skipif(load() is None, reason="the C++ switch is not built")  # without it gloo may leave one of them hanging (docs/limits.md)
@pytest.mark.parametrize("point", ["after_vote", "in_optimizer"])
def test_an_evaluation_gathers_garbage(trials: Trials, point: str) -> None:
    """FSDP keeps what it gathered for the next forward pass, which must not use it."""
    assert trials.kill("hsdp", 1, point, TEST_EVALUATE="1", **{ENV_SWITCH: "shim"}) == TRIED + 1


@pytest.mark.parametrize("mode", ["hsdp", "fsdp2"])
def test_a_drain_after_an_evaluation(trials: Trials, mode: str) -> None:
    """What is gathered stands in the way of the shards; fsdp2 takes snapshots all the while."""
    trials.drain(mode, 1, TEST_EVALUATE="1")


def tail_of_a_step() -> Tail:
    weight = torch.nn.Parameter(torch.zeros(3))
    live = SimpleNamespace(hidden=0, started=0, queues=(), groups=SimpleNamespace(poisoned=False))
    state = SimpleNamespace(trained=lambda: [weight], ddps=[])
    process = SimpleNamespace(live=live, state=state, rank=1, counters=SimpleNamespace(done=5), board=SimpleNamespace(failure=None))
    return Tail(cast(Any, process), 5)


def test_a_step_without_a_loss_looks_at_no_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes as long as the parameters are large."""
    looked: list[torch.Tensor] = []
    monkeypatch.setattr(values, "fingerprint", lambda tensor: looked.append(tensor) or b"")
    for lost in (False, True):
        tail = tail_of_a_step()
        tail.collective(dist.all_reduce, lambda: None, (torch.ones(1),), {})
        if lost:
            tail.skip()
        tail.end()
        assert bool(looked) == lost


def test_what_torch_coalesces_is_waited_for_by_its_manager() -> None:
    x, tail = torch.full((1,), 3.0), tail_of_a_step()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with c10d._coalescing_manager(async_ops=True) as manager:
            tail.collective(dist.all_reduce, lambda: dist.all_reduce(x, async_op=True), (x,), {})
        manager.wait()
    finally:
        dist.destroy_process_group()
    assert x.item() == 3
