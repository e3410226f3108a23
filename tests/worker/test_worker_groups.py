"""Exchanging the backend under a process group, again and again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from conftest import Undisturbed
from nursery import Nursery
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.fsdp import fully_shard

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.worker import comm, shim
from tmrun.worker.groups import ENV_SWITCH
from tmrun.worker.slot import SlotSwitch
from tmrun.worker.state import State

CPU = torch.device("cpu")
GLOO = comm.CONTROL


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_more_than_a_hundred_switches_with_a_poison_in_between(world: dist.ProcessGroup) -> None:
    switch, name = SlotSwitch(world, GLOO, fake=False), world.group_name
    for _ in range(120):
        switch.poison()
        poison = world._get_backend(CPU)
        backend = FakeProcessGroup._create_internal(0, 1)
        switch.install({"cpu": backend})
        assert world._get_backend(CPU) is backend
        assert world.group_name == name
    switch.poison()
    assert world._get_backend(CPU) is poison
    real = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    switch.install({"cpu": real})
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [1.0, 1.0, 1.0]


def test_when_the_room_is_used_up_it_says_so(world: dist.ProcessGroup) -> None:
    switch = SlotSwitch(world, GLOO, fake=False)
    while switch.room:
        switch.install({"cpu": FakeProcessGroup._create_internal(0, 1)})
    with pytest.raises(WorkerError, match="was switched 240 times; restart the job"):
        switch.install({"cpu": FakeProcessGroup._create_internal(0, 1)})


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("broken", ["one", "two"])
def test_every_fsdp_root_forgets_the_step(world: dist.ProcessGroup, broken: str) -> None:
    """Two that were sharded on their own, below a module that was not."""
    model = torch.nn.ModuleDict({name: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)) for name in ("one", "two")})
    for part in model.values():
        fully_shard(part[0]), fully_shard(part)
    model["unused"] = fully_shard(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = State()
    state.register({"model": model, "optimizer": optimizer})

    def grads() -> list[Any]:
        optimizer.zero_grad()
        (model["one"](torch.ones(2, 3)) + model["two"](torch.ones(2, 3))).sum().backward()
        return [p.grad.to_local().tolist() for name in ("one", "two") for p in model[name].parameters()]

    wanted = grads()
    kept = state.snapshot()
    hook = model[broken][1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        grads()
    hook.remove()
    state.rollback(kept)
    assert grads() == wanted


MANY = Path(__file__).with_name("many_groups.py")
STEPS = 40
Run = Callable[[Path, int, int], Undisturbed]
MODES = ["slot", pytest.param("shim", marks=pytest.mark.skipif(shim.load() is None, reason="run `python -m tmrun.worker.shim` first"))]


@dataclass
class Job:
    """many_groups.py on four ranks."""

    cluster: Cluster
    die: Path

    def kill(self, rank: int, point: str) -> None:
        (self.die / f"{point}-{rank}").touch()
        self.cluster.died(rank)
        (self.die / f"{point}-{rank}").unlink()

    def freeze(self, rank: int, point: str) -> None:
        (self.die / f"{point}-{rank}").write_text("SIGSTOP")
        stat = Path(f"/proc/{self.cluster.ranks[rank].pid}/stat")
        deadline = time.monotonic() + 60
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < deadline, self.cluster.output()
            time.sleep(0.05)
        (self.die / f"{point}-{rank}").unlink()

    def pass_step(self, offset: int = 2) -> None:
        """Wait for some steps."""
        log = self.cluster.losses / "groups0.txt"
        have = len(log.read_text().splitlines()) if log.exists() else 0
        self.cluster.agent.wait(lambda: log.exists() and len(log.read_text().splitlines()) >= have + offset, 60, "steps")

    def fates(self, rank: int) -> tuple[int, int]:
        """How many of its groups it says were rebuilt, and how many kept, in the only migration."""
        switched = self.cluster.expect(self.cluster.ranks[rank], wire.Switched, epoch=2)
        return len(switched.rebuilt), len(switched.kept)

    def connections(self, rank: int) -> dict[int, dict[str, list[str]]]:
        lines = (self.cluster.losses / f"groups{rank}.txt").read_text().splitlines()
        return {step: groups for step, _, groups in map(json.loads, lines)}

    def ended(self, rank: int) -> str:
        """The output of a rank whose script ends with an error."""
        worker = self.cluster.ranks[rank]
        assert worker.process.wait(60) == 1, self.cluster.output()
        return worker.log.read_text()


@pytest.fixture(params=MODES)
def job(request: pytest.FixtureRequest, tmp_path: Path, nursery: Nursery) -> Iterator[Job]:
    die = tmp_path / "die"
    die.mkdir()
    environment = {"TEST_DIE": str(die), ENV_SWITCH: request.param, "TMRUN_TEST_RETIRE_S": "0"}
    cluster = Cluster(tmp_path, 4, ["--steps", str(STEPS)], environment, MANY)
    cluster.nursery = nursery
    yield Job(cluster, die)
    cluster.close()


def test_a_drain_changes_only_the_groups_of_the_leaver(job: Job, undisturbed: Run) -> None:
    """Groups made before the loop, late, in every step, by all and by some; then again by all, the joiner included."""
    joiner = job.cluster.standby(3)
    job.cluster.start()
    job.cluster.reach(6)
    stop = job.cluster.drain(3, joiner)
    assert job.cluster.finish() == undisturbed(MANY, 4, STEPS).digest
    for rank in range(3):
        seen = job.connections(rank)
        before, after = seen[stop - 1], seen[stop]
        for name in before:
            touched = "3" in name.split("/")[0].split(",")
            assert (before[name] != after[name]) == touched, (rank, name)
        assert any(name.startswith("0,2/") and len(before) == len(after) for name in before) or rank == 1
    assert len(job.connections(0)[stop]) == 4, "the world, two pairs, and the late one"
    assert job.fates(0) == (1, 3)
    assert job.fates(2)[0] == 2, "the world and the pair with the leaver"


def test_a_crash_changes_what_may_have_been_in_use(job: Job, undisturbed: Run) -> None:
    """Rank 1 dies after the pairs' collectives: the pairs without it are idle, and known to be with the shim."""
    joiner = job.cluster.standby(1)
    job.cluster.start()
    job.cluster.reach(6)
    job.kill(1, "world")
    target = job.cluster.heal({1: joiner})
    assert job.cluster.finish() == undisturbed(MANY, 4, STEPS).digest
    kept = {r: set(job.cluster.expect(job.cluster.ranks[r], wire.Prepared).kept) for r in (0, 2, 3)}
    if job.cluster.environment[ENV_SWITCH] == "slot":
        assert kept == {0: set(), 2: set(), 3: set()}
    else:
        assert [len(kept[r]) for r in (0, 2, 3)] == [2, 3, 1], "(0, 2), its late twin, (2, 3)"
    for rank in (0, 2, 3):
        seen = job.connections(rank)
        before, after = seen[target - 1], seen[target]
        assert {n for n in before if before[n] == after[n]} == {n for n in before if n.split("/")[1] in kept[rank]}
        assert job.fates(rank) == (len(before) - len(kept[rank]), len(kept[rank])), "what history tells"


def test_ranks_die_where_others_wait_for_them_to_make_a_group(job: Job, undisturbed: Run) -> None:
    """The step is run again, and makes its groups again, under the same names; its update is as if nothing had happened."""
    joiners = [job.cluster.standby(rank) for rank in (1, 3, 1)]
    job.cluster.start()
    job.cluster.reach(6)
    for joiner, point in zip(joiners, ("new", "pairs", "made"), strict=True):
        job.kill(joiner.rank, point)
        job.cluster.heal({joiner.rank: joiner})
        job.pass_step()
    assert job.cluster.finish() == undisturbed(MANY, 4, STEPS).digest


def test_a_stale_reference_fails(job: Job) -> None:
    """The world's first communicator is still there after a drain, and all stayers with it, but its connections are closed."""
    job.cluster.environment["TEST_STALE"] = "1"
    joiner = job.cluster.standby(3)
    job.cluster.start()
    job.cluster.reach(6)
    job.cluster.drain(3, joiner)
    job.pass_step()
    (job.die / "stale").touch()

    def written(when: str) -> list[dict[str, Any]]:
        paths = [job.cluster.losses / f"stale-{when}-{rank}.txt" for rank in (0, 2)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    job.cluster.agent.wait(lambda: len(written("late")) == 2, 20, "an error, not gloo's timeout")
    assert [each["came"] for each in written("early")] == [[""], [""]], "it worked before the switch"
    for each in written("late"):
        assert len(each["came"]) == 2 and all(each["came"]), each
    assert sum(each["closed"] for each in written("late")) > 0
    assert sum(each["closed"] for each in written("early")) == 0
    job.cluster.finish()


def moves(job: Job, how: str) -> int:
    """Rank 3 moves; the step at which it does."""
    joiner = job.cluster.standby(3)
    job.cluster.start()
    job.cluster.reach(6)
    if how == "drain":
        return job.cluster.drain(3, joiner)
    job.kill(3, "pairs")
    return job.cluster.heal({3: joiner})


CLOSED = (
    r"process group \S+ of ranks \[2, 3\] contains rank 3, which moved, and not all of its members have it; make groups before run.steps"
)


@pytest.mark.parametrize("how", ["drain", "crash"])
def test_a_late_group_of_a_rank_that_moved_is_closed(job: Job, how: str) -> None:
    """Its joiner does not have it: its next use is an error, in the step after the switch, and nobody waits."""
    job.cluster.environment["TEST_LATE"] = "2,3,2"
    step = moves(job, how)
    assert re.search(f"WorkerError: {CLOSED}", job.ended(2))
    assert max(job.connections(2)) == step - 1


@pytest.mark.parametrize("how", ["drain", "crash"])
@pytest.mark.parametrize("job", MODES[1:], indirect=True)
def test_a_closed_group_refuses_its_own_methods(job: Job, how: str) -> None:
    """And with them whatever torch does in C++."""
    job.cluster.environment.update(TEST_LATE="2,3,2", TEST_DIRECTLY="1")
    step = moves(job, how)
    assert re.search(CLOSED, job.ended(2))
    assert max(job.connections(2)) == step - 1


def test_a_group_that_was_made_in_an_undone_step_is_closed(job: Job) -> None:
    """Whoever keeps it would have one more than the joiner."""
    job.cluster.environment.update(TEST_LATE="0,2,8", TMRUN_TEST_KILL="1:8:new")
    joiner = job.cluster.standby(1)
    job.cluster.start()
    job.cluster.died(1)
    assert job.cluster.heal({1: joiner}) == 8
    why = r"process group \S+ of ranks \[0, 2\] was made in step 8, which was undone; make groups before run.steps"
    for rank in (0, 2):
        assert re.search(f"WorkerError: {why}", job.ended(rank))
        assert max(job.connections(rank)) == 7
