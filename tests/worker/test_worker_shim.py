"""A representative part of the suite with the C++ switch; ``TMRUN_SWITCH=shim pytest tests/worker`` runs all of it that way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import SCRIPT, Cluster
from nursery import Nursery

from tmrun.core.errors import WorkerError
from tmrun.worker import shim
from tmrun.worker.groups import ENV_SWITCH, choose

Make = Callable[..., Cluster]
Same = Callable[..., None]
STEP = 6
HSDP = Path(__file__).with_name("hsdp.py")
needs_shim = pytest.mark.skipif(shim.load() is None, reason="run `python -m tmrun.worker.shim` first")


@pytest.fixture
def cluster(cluster: Make, nursery: Nursery) -> Make:
    def make(world: int, script: Path = SCRIPT, **environment: str) -> Cluster:
        job = cluster(world, script, **environment)
        job.nursery = nursery
        return job

    return make


@needs_shim
def test_drained(cluster: Make, same: Same) -> None:
    job = cluster(2, TMRUN_SWITCH="shim")
    joiner = job.standby(1)
    job.start()
    job.reach(4)
    job.drain(1, joiner)
    same(job)


@needs_shim
@pytest.mark.parametrize("point", ["backward", "after_vote"])
def test_killed(cluster: Make, same: Same, point: str) -> None:
    """The survivor's body runs on to its vote, on garbage, without an exception."""
    job = cluster(2, TMRUN_SWITCH="shim", TMRUN_TEST_KILL=f"1:{STEP}:{point}")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == STEP + (point == "after_vote")
    same(job, unlogged=((1, STEP),))


@needs_shim
def test_sharded_killed(cluster: Make, same: Same) -> None:
    job = cluster(4, HSDP, TMRUN_SWITCH="shim", TMRUN_TEST_KILL=f"1:{STEP}:backward")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == STEP
    same(job)


@needs_shim
def test_the_vote_is_lost_and_the_rest_of_the_step_communicates(cluster: Make, same: Same) -> None:
    job = cluster(3, TMRUN_SWITCH="shim", TMRUN_TEST_KILL=f"1:{STEP}:after_vote,0:{STEP}:lose_vote", TEST_TAIL="1")
    joiner = job.standby(1)
    job.start(at_once=True)
    job.died(1)
    assert job.heal({1: joiner}) == STEP + 1
    same(job, unlogged=((1, STEP),))


@needs_shim
def test_ranks_may_differ(cluster: Make, same: Same) -> None:
    """The joiner has no shim in its cache; the job goes on."""
    job = cluster(2, TMRUN_SWITCH="slot")
    joiner = job.standby(1)
    job.environment[ENV_SWITCH] = "shim"
    job.start()
    job.reach(4)
    job.drain(1, joiner)
    same(job)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; and nothing but the slot is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shim.sys, "modules", {k: v for k, v in shim.sys.modules.items() if k != "tmrun_shim"})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(WorkerError, match=r"^the C\+\+ switch cannot be built: a C\+\+ compiler \(.*\) is not installed[^\n]*$"):
        shim.build()
    assert choose().name == "slot"
    monkeypatch.setenv(ENV_SWITCH, "shim")
    with pytest.raises(WorkerError, match="is not built"):
        choose()
    monkeypatch.setenv(ENV_SWITCH, "fast")
    with pytest.raises(WorkerError, match="use auto, shim or slot"):
        choose()
