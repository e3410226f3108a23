"""Every public way to communicate works before and after a switch for a drain, and after one for a crash, with the same results as if
nothing had happened.

The connections of replaced communicators are shut as soon as they are replaced, so a reference that still uses one fails
(``test_worker_groups.test_a_stale_reference_fails``).
"""

from __future__ import annotations

import ast
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.distributed_c10d as c10d
from cluster import Cluster
from conftest import Undisturbed
from nursery import Nursery
from test_worker_groups import MODES, Job

from tmrun import wire
from tmrun.worker.groups import ENV_SWITCH

Run = Callable[[Path, int, int], Undisturbed]
SCRIPT = Path(__file__).with_name("every_use.py")
STEPS = 26
MUST = {"objects", "functional", "compiled", "dtensor", "sub_groups", "checkpoint"}
ASKS = {"get_backend", "get_backend_config", "get_global_rank", "get_group_rank", "get_process_group_ranks", "get_rank", "get_world_size"}
REFUSED = {"shrink_group", "split_group"}
OTHER_NAMES = {
    "all_gather_inplace", "all_gather_tensor_inplace", "all_reduce_inplace", "all_to_all_inplace", "irecv_inplace", "isend_inplace",
    "reduce_scatter_tensor_inplace", "all_gather_single_autograd", "reduce_scatter_single_autograd",
}  # fmt: skip
"""What torch.compile puts in the place of plain collectives, and autograd functions that are others by another name."""


@pytest.fixture(params=MODES)
def job(request: pytest.FixtureRequest, tmp_path: Path, nursery: Nursery) -> Iterator[Job]:
    die = tmp_path / "die"
    die.mkdir()
    environment = {"TEST_DIE": str(die), wire.ENV_RECORDS: "1", ENV_SWITCH: request.param, "TMRUN_TEST_RETIRE_S": "0"}
    cluster = Cluster(tmp_path, 4, ["--steps", str(STEPS)], environment, SCRIPT)
    cluster.nursery = nursery
    yield Job(cluster, die)
    cluster.close()


def closed(job: Job) -> int:
    """How many connections were closed behind switches, by all processes."""
    return sum(int(path.read_text() or 0) for path in job.cluster.losses.glob("closed*.txt"))


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint, read without any process group."""
    model = {"up.weight": (16, 8), "up.bias": (16,), "down.weight": (8, 16), "down.bias": (8,)}
    trained = {"weight": (4, 4), "bias": (4,)}
    parts = {"model": model, "trained": trained}
    state = {part: {name: torch.full(shape, torch.nan) for name, shape in names.items()} for part, names in parts.items()}
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return {f"{part}.{name}": tensor for part, names in state.items() for name, tensor in names.items()}


def assert_same(job: Job, run: Run) -> None:
    """What every step computed with on every rank, and the final parameters, are those of a run that nothing happened to."""
    alone = run(SCRIPT, 4, STEPS)
    assert job.cluster.finish() == alone.digest
    for rank in range(4):
        assert (job.cluster.losses / f"done{rank}.txt").read_text() == (alone.logs / f"done{rank}.txt").read_text(), rank


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # where the test itself reads a checkpoint
def test_every_use_before_and_after(job: Job, undisturbed: Run) -> None:
    """In the crashes ranks die in the middle of a step: before the compiled collective, before object collectives, and inside a save, where
    the others are in its object collectives."""
    leaver, *victims = job.cluster.standby(2), job.cluster.standby(1), job.cluster.standby(3), job.cluster.standby(1)
    job.cluster.start()
    job.cluster.reach(2)
    drained = job.cluster.drain(2, leaver)
    job.cluster.agent.wait(lambda: closed(job) > 0, 60, "what was replaced is closed")  # in a crash it is cut, and closed with that
    healed = drained
    for rank, case, victim in zip((1, 3, 1), ("compiled", "objects", "saving"), victims, strict=True):
        job.cluster.reach(healed + 2)
        job.kill(rank, case)
        healed = job.cluster.heal({rank: victim})
    assert 2 <= drained < healed < STEPS - 2
    assert healed % 4 == 0, "a step that saves was run again"
    assert_same(job, undisturbed)
    mine, wanted = (saved(logs / f"checkpoint{healed}") for logs in (job.cluster.losses, undisturbed(SCRIPT, 4, STEPS).logs))
    assert mine.keys() == wanted.keys() and all(torch.equal(mine[name], wanted[name]) for name in wanted)
    late = job.cluster.standby(2, TEST_REPLAYED="1")  # the live ranks' first step is replayed to whoever rehearses after it
    warm = job.cluster.expect(late, wire.Warm)
    assert warm.rehearsal.replayed > 50 and set(warm.rehearsal.synthesised) < {"all_reduce", "all_gather_object", "gather_object"}
    assert not (job.cluster.losses / "written_by_a_rehearsal").exists()


def test_frozen_while_others_wait(job: Job, undisturbed: Run) -> None:
    """Nobody gets an error from a peer that stands still. Whoever waits for it, in an object collective, in FSDP or in the vote, comes back
    when the agent says so, and not after gloo's half an hour."""
    frozen = [(1, "objects"), (3, "fully_sharded"), (1, "vote")]
    joiners = [job.cluster.standby(rank) for rank, _ in frozen]
    job.cluster.start()
    target = 1
    for (rank, case), joiner in zip(frozen, joiners, strict=True):
        job.cluster.reach(target + 2)
        job.freeze(rank, case)
        time.sleep(0.5)  # until the others wait
        began = time.monotonic()
        number = job.cluster.prepare(wire.Kind.FAILURE, {rank: joiner})
        for other in job.cluster.ranks.keys() - {rank}:
            job.cluster.expect(job.cluster.ranks[other], wire.Prepared, migration=number)
        assert time.monotonic() - began < 40
        target = job.cluster.conclude(number, {rank: joiner})
    assert_same(job, undisturbed)


def with_a_group(module: Any, names: Iterable[str]) -> set[str]:
    """Functions that take a process group."""
    functions = {name: vars(module)[name] for name in names if type(vars(module).get(name)) is FunctionType}
    return {name for name, function in functions.items() if "group" in inspect.signature(function).parameters}


def test_nothing_is_forgotten() -> None:
    """Whatever this torch offers that takes a group is used, but for a few that have their reasons."""
    (cases,) = [node for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Cases"]
    assert {method.name for method in cases.body if isinstance(method, ast.FunctionDef)} >= MUST
    used: dict[str, set[str]] = {"dist": set(), "functional": set()}
    for node in ast.walk(cases):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, set()).add(node.attr)
    assert with_a_group(c10d, c10d.__all__) - ASKS - REFUSED <= used["dist"]
    own = [name for name in vars(functional) if not name.startswith(("_", "legacy_"))]
    assert with_a_group(functional, own) - OTHER_NAMES <= used["functional"]
