"""Every public way to communicate works before and after a switch for a drain, and after one for a crash.

The connections of replaced communicators are shut as soon as they are replaced, so a reference that still uses one fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from nursery import Nursery
from test_worker_groups import MODES, Job

from tmrun import wire
from tmrun.worker.groups import ENV_SWITCH

SCRIPT = Path(__file__).with_name("every_use.py")
STEPS = 26
MUST = {
    "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "send_recv",
    "batch_isend_irecv", "objects", "functional", "compiled", "dtensor", "sub_groups", "checkpoint",
}  # fmt: skip


@pytest.fixture(params=MODES)
def job(request: pytest.FixtureRequest, tmp_path: Path, nursery: Nursery) -> Iterator[Job]:
    die = tmp_path / "die"
    die.mkdir()
    environment = {"TEST_DIE": str(die), wire.ENV_RECORDS: "1", ENV_SWITCH: request.param, "TMRUN_TEST_RETIRE_S": "0"}
    cluster = Cluster(tmp_path, 4, ["--steps", str(STEPS)], environment, SCRIPT)
    cluster.nursery = nursery
    yield Job(cluster, die)
    cluster.close()


def test_every_use_before_and_after(job: Job) -> None:
    """In the crashes ranks die in the middle of a step, before the compiled collective, object collectives, and saving."""
    leaver, *victims = job.cluster.standby(2), job.cluster.standby(1), job.cluster.standby(3), job.cluster.standby(1)
    job.cluster.start()
    job.cluster.reach(2)
    drained = job.cluster.drain(2, leaver)
    healed = drained
    for rank, case, victim in zip((1, 3, 1), ("compiled", "objects", "checkpoint"), victims, strict=True):
        job.cluster.reach(healed + 2)
        job.kill(rank, case)
        healed = job.cluster.heal({rank: victim})
    assert 2 <= drained < healed < STEPS - 2
    job.cluster.finish()
    for rank in range(4):
        assert (job.cluster.losses / f"done{rank}.txt").read_text().split() == [str(s) for s in range(STEPS)], rank
    late = job.cluster.standby(2, TEST_REPLAYED="1")  # the live ranks' first step is replayed to whoever rehearses after it
    warm = job.cluster.expect(late, wire.Warm)
    assert warm.rehearsal.replayed > 50 and set(warm.rehearsal.synthesised) < {"all_reduce", "all_gather_object", "gather_object"}
    assert not (job.cluster.losses / "written_by_a_rehearsal").exists()


def test_nothing_is_forgotten() -> None:
    classes = [node for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Cases"]
    assert {method.name for method in classes[0].body if isinstance(method, ast.FunctionDef)} >= MUST
