"""What is the C++ switch's own; half of the other tests run with it (``cluster.switch_of_this_test``), or all, with TMRUN_SWITCH=shim."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster

from tmrun.cli import switch
from tmrun.core.errors import WorkerError
from tmrun.worker import comm, shim, shim_cache
from tmrun.worker.groups import ENV_SWITCH, choose

Make = Callable[..., Cluster]
Same = Callable[..., None]
STEP = 6
HSDP = Path(__file__).with_name("hsdp.py")
REAL = shim_cache.path()
needs_shim = pytest.mark.skipif(shim.load() is None, reason="run `python -m tmrun.worker.shim` first")


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_where_there_is_a_compiler_it_is_built() -> None:
    """Else half of these tests would be skipped, and nobody would notice."""
    assert shim.load() is not None, "run `python -m tmrun.worker.shim`, and read what it says"


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
    monkeypatch.delenv(ENV_SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shim.sys, "modules", {k: v for k, v in shim.sys.modules.items() if k != "tmrun_shim"})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(WorkerError, match=r"^the C\+\+ switch cannot be built: there is no compiler [^\n]*$"):
        shim.build()
    assert choose().name == "slot"
    monkeypatch.setenv(ENV_SWITCH, "shim")
    with pytest.raises(WorkerError, match="is not built"):
        choose()
    monkeypatch.setenv(ENV_SWITCH, "fast")
    with pytest.raises(WorkerError, match="use auto, shim or slot"):
        choose()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for a compiler: takes its time, notes that it was called. The cache is empty."""
    fake = tmp_path / "fake-c++"
    fake.write_text(f"""#!/bin/sh
echo called >> {tmp_path}/calls
sleep 0.3
[ -e {tmp_path}/broken ] && echo "no such header" && exit 1
while [ "$1" != -o ]; do shift; done
cp {REAL} "$2"
""")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(ENV_SWITCH, raising=False)
    return tmp_path


@needs_shim
def test_one_compiles_when_several_want_it(compiler: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        built = [f.result() for f in [pool.submit(shim.build) for _ in range(3)]]
    assert set(built) == {shim_cache.path()}
    assert shim_cache.path().read_bytes() == REAL.read_bytes()
    assert (compiler / "calls").read_text() == "called\n"


@needs_shim
def test_it_is_built_beside_a_job_and_never_waited_for(compiler: Path) -> None:
    with ExitStack() as stack:
        began = time.monotonic()
        switch.build_beside(stack)
        assert time.monotonic() - began < 0.3, "the compiler alone takes longer"
        deadline = time.monotonic() + 60
        while not shim_cache.path().exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        switch.build_beside(stack)  # it is there: nothing to do
    assert (compiler / "calls").read_text() == "called\n"


def test_one_line_when_it_does_not_compile(compiler: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (compiler / "broken").touch()
    with ExitStack() as stack:
        switch.build_beside(stack)
        deadline = time.monotonic() + 60
        while not list((compiler / "cache").rglob("*.log")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
    said = capfd.readouterr().err
    assert said.startswith("tmrun: the C++ switch did not compile, process groups are switched in Python"), said
    assert said.count("\n") == 1
    assert "no such header" in next((compiler / "cache").rglob("*.log")).read_text()


@needs_shim
def test_a_group_keeps_its_first_communicator_only_as_long_as_it_lives() -> None:
    """The one thing that torch never releases: one a living group, however often it is switched or made anew."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def once(switches: int) -> int:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        one = shim.ShimSwitch(shim.load(), dist.group.WORLD, comm.CONTROL, fake=False)
        for _ in range(switches):
            one.install({"cpu": dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))})
            one.release()
        dist.all_reduce(torch.ones(1))
        alive = threads()
        dist.destroy_process_group()
        return alive

    first = [once(1), threads()]
    assert [once(10), threads()] == first
    assert [once(10), threads()] == first


@pytest.fixture
def half_alone() -> Iterator[Any]:
    """A shim over one of two connected communicators; nobody ever uses the other."""
    store, module = dist.HashStore(), shim.load()
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), range(2))
    one = module.Shim(0, 2)
    one.swap(ours)
    yield module, one
    module.arm(False)
    module.fail(False)
    del theirs


WAYS: dict[str, Callable[[Any], Callable[[], object]]] = {
    "collective": lambda one: one.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait,
    "without a future": lambda one: one._reduce_scatter_base(torch.ones(1), torch.ones(2), dist.ReduceScatterOptions()).wait,
    "future": lambda one: one.allreduce([torch.ones(2)], dist.AllreduceOptions()).get_future().wait,
    "receive": lambda one: one.recv([torch.ones(2)], 1, 0).wait,
}


@needs_shim
@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_whoever_waits_for_what_cannot_end_is_let_go(half_alone: Any, way: str, in_step: bool) -> None:
    """In a step the loss is hidden, outside it is an error."""
    module, one = half_alone
    module.arm(in_step)
    wait = WAYS[way](one)

    def lose() -> None:
        module.fail(True)
        module.abandon()

    threading.Timer(0.2, lose).start()
    began = time.monotonic()
    if in_step:
        wait()
    else:
        with pytest.raises(RuntimeError, match="a rank was lost"):
            wait()
    assert 0.1 < time.monotonic() - began < 10
