"""The NCCL path as far as a machine without a GPU can try it: decisions, environment, and real switches over a stand-in for NCCL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_nccl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from cluster import Cluster
from fake_nccl import FakeNccl, Options, notes
from nursery import Nursery
from torch._C._distributed_c10d import FakeProcessGroup

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.worker import comm, comm_gloo, comm_nccl, graphs, intercept, native, nccl_environment, shim
from tmrun.worker.build import Build, Plan, Role, Status
from tmrun.worker.comm import Like
from tmrun.worker.comm_nccl import Handle
from tmrun.worker.groups import ENV_SWITCH
from tmrun.worker.shim import ShimSwitch, ShimSwitching
from tmrun.worker.slot import SlotSwitch

Make = Callable[..., Cluster]
Same = Callable[..., None]
MINUTE = timedelta(minutes=1)
GPU = torch.device("cuda", 0)
BOTH = "cpu:gloo,cuda:nccl"
needs_shim = pytest.mark.skipif(shim.load() is None, reason="run `python -m tmrun.worker.shim` first")
SWITCHES = ["slot", pytest.param("shim", marks=needs_shim)]


@pytest.fixture(autouse=True)
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(c10d, "_NCCL_AVAILABLE", True)


# -- what torch is told ---------------------------------------------------------------------------------------------------------------
def test_the_watchdog_may_look_but_not_act() -> None:
    launched = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ASYNC_ERROR_HANDLING": "1", "HOME": "/root"}
    nccl_environment.prepare(launched)
    assert launched["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == launched["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert launched["TORCH_NCCL_DESYNC_DEBUG"] == "0", "else torch turns error handling on again"
    assert "NCCL_ASYNC_ERROR_HANDLING" not in launched, "torch reads the old name too"
    assert launched["NCCL_RUNTIME_CONNECT"] == "1" and launched["HOME"] == "/root"
    assert nccl_environment.wanted(launched) == {}


def test_what_the_user_chose_stays_where_it_does_no_harm() -> None:
    assert "NCCL_RUNTIME_CONNECT" not in nccl_environment.wanted({"NCCL_RUNTIME_CONNECT": "0"})


def test_every_variable_is_one_that_torch_knows() -> None:
    """The names, in the header that comes with torch."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    known = header.read_text()
    everything = (*nccl_environment.FORCED, *nccl_environment.DEFAULTS, *nccl_environment.OLD_NAMES)
    ours = [n for n in everything if not n.startswith(("NCCL_COMM", "NCCL_RUNTIME"))]
    assert [name for name in ours if f'"{name}"' not in known] == []


def test_options_keep_what_the_script_chose_but_no_ties() -> None:
    given = Options(is_high_priority_stream=True)
    given.config.min_ctas, given.config.split_share, given.config.blocking = 4, 1, 0
    given.split_from, given.group_name = object(), "7"
    ours = comm_nccl.options_like(FakeNccl, given, MINUTE)
    assert (ours.is_high_priority_stream, ours.config.min_ctas, ours.group_name, ours._timeout) == (True, 4, "7", MINUTE)
    untouched = fake_nccl.UNDEFINED
    assert (ours.config.max_ctas, ours.config.split_share, ours.config.blocking) == (untouched, untouched, untouched)
    assert ours.split_from is None and ours.config.net_name is None
    assert comm_nccl.options_like(FakeNccl, None, MINUTE).is_high_priority_stream is False


REAL = getattr(torch._C._distributed_c10d, "ProcessGroupNCCL", None)


@pytest.mark.skipif(REAL is None, reason="torch is built without NCCL")
def test_the_real_options_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, but with torch's own classes: fields have the names and types that are meant here."""
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", REAL)
    real: Any = REAL
    given = real.Options(is_high_priority_stream=True)
    given.config.min_ctas, given.config.blocking, given.global_ranks_in_group = 4, 0, [0, 1]
    ours = comm_nccl.options_like(comm_nccl.class_of("nccl"), given, MINUTE)
    assert (ours.is_high_priority_stream, ours.config.min_ctas, ours._timeout, ours.global_ranks_in_group) == (True, 4, MINUTE, [0, 1])
    assert ours.config.blocking == real.Options().config.blocking
    ours.config.blocking = 1
    assert all(callable(getattr(real, name)) for name in ("abort", "eager_connect_single_device", "_set_default_timeout"))
    if torch.cuda.device_count() == 0:
        with pytest.raises(ValueError, match="no GPUs found"):
            comm.build(comm.kinds_of("g", "cuda:nccl"), dist.HashStore(), 0, 1, MINUTE)
    if hasattr(c10d, "ProcessGroupNCCL2"):
        second = comm_nccl.options_like(comm_nccl.class_of("nccl2"), None, MINUTE)
        second.enable_reconfigure = True
        assert comm.parts_of(comm.kinds_of("g", "nccl2")) == [(comm_nccl.NCCL2, ("cuda",))]


def test_names_of_backends() -> None:
    assert comm.parts_of(comm.kinds_of("g", BOTH)) == [(comm_gloo, ("cpu",)), (comm_nccl.NCCL, ("cuda",))]
    assert comm.parts_of(comm.kinds_of("g", "nccl")) == [(comm_nccl.NCCL, ("cuda",))]
    assert comm.parts_of(comm.kinds_of("g", "gloo")) == [(comm_gloo, ("cpu", "cuda"))]
    with pytest.raises(WorkerError, match=r"process group g uses gloo, mpi; this version of tmrun can switch gloo, nccl, nccl2 only"):
        comm.kinds_of("g", "cpu:gloo,cuda:mpi")


def test_a_torch_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(c10d, "ProcessGroupNCCL")
    with pytest.raises(WorkerError, match="has no nccl backend"):
        comm_nccl.class_of("nccl")
    monkeypatch.setattr(c10d, "ProcessGroupNCCL2", dict, raising=False)
    assert comm_nccl.class_of("nccl2") is dict
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    assert comm_nccl.class_of("nccl") is dict


def test_detailed_debugging_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(WorkerError, match="use INFO or leave it out"), comm.making(comm.kinds_of("g", BOTH)):
        pass


# -- aborting -------------------------------------------------------------------------------------------------------------------------
class Slow:
    """A backend whose abort waits: for another one's, as kernels queued behind each other do."""

    def __init__(self, after: threading.Event | None = None, error: str = "") -> None:
        self.after, self.error, self.aborted, self.calls = after, error, threading.Event(), 0

    def abort(self) -> None:
        self.calls += 1
        if self.after is not None:
            assert self.after.wait(20)
        self.aborted.set()
        if self.error:
            raise RuntimeError(self.error)


def test_an_abort_keeps_nobody_waiting_and_happens_once() -> None:
    gate = threading.Event()
    slow = Slow(gate)
    handle = Handle(slow)
    assert not handle.quiet(), "nobody aborted it"
    began = time.monotonic()
    assert (handle.abort(), handle.abort()) == (1, 0)
    assert time.monotonic() - began < 1 and not handle.quiet()
    gate.set()
    handle.vacate()
    assert handle.quiet() and slow.calls == 1


def test_memory_is_given_back_by_all_at_once() -> None:
    """One that waits for a later one must not keep it from being told."""
    second = Slow()
    first = Slow(second.aborted)
    comm.vacate([comm.joined([comm_gloo.Connections(), Handle(first)]), Handle(second)])
    assert first.aborted.is_set() and second.aborted.is_set()


def test_memory_that_does_not_come_back_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(comm_nccl, "_VACATE_S", 0.1)
    gate = threading.Event()
    Handle(Slow(gate)).vacate()
    assert capsys.readouterr().err.startswith("tmrun: NCCL did not give a replaced communicator's memory back within 0.1 s")
    gate.set()


def test_what_was_built_for_a_migration_that_is_off_is_aborted() -> None:
    plan = Plan(wire.Prepare(1, wire.Kind.DRAIN, 2, (1,), 0, 1), Role.STAYER, 2, ())
    build = Build(plan, lambda: None, lambda _: None)  # type: ignore[arg-type, return-value]
    slow = Slow()
    build.built.groups["g"] = comm.Communicator({}, Handle(slow))
    build.status = Status.READY
    build.drop()
    assert slow.aborted.wait(10)


def test_torch_is_not_told_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it splits communicators, in device meshes too, in ways that nothing of ours sees."""
    told: dict[str, Any] = {}

    def helper(*args: Any, **kwargs: Any) -> Any:
        told.update(kwargs)
        return c10d.GroupMember.NON_GROUP_MEMBER, None

    monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
    for name in ("_store_based_barrier", "_set_pg_timeout", "destroy_process_group", "split_group", "shrink_group"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))
        monkeypatch.setattr(dist, name, getattr(dist, name, None), raising=False)
    runtime = SimpleNamespace(making_group=lambda *_: nullcontext(), sandboxed=False, patience=lambda t: t, scoped=lambda s: s)
    intercept._catch_groups(runtime)  # type: ignore[arg-type]
    c10d._new_process_group_helper(2, 0, [], "nccl", None, "0", timeout=MINUTE, device_id=torch.device("cuda", 0))  # type: ignore[arg-type]
    assert told["device_id"] is None and told["timeout"] == MINUTE


def test_an_abort_that_torch_gives_up_is_over() -> None:
    handle = Handle(Slow(error="abort timed out"))
    handle.vacate()
    assert handle.quiet()


# -- building -------------------------------------------------------------------------------------------------------------------------
def test_a_group_whose_members_pair_up_initialises_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_NCCL_LOG", str(tmp_path))
    made = [comm.build(comm.kinds_of("g", "nccl"), dist.HashStore(), 0, 1, MINUTE, Like(GPU, None, pairwise)) for pairwise in (False, True)]
    assert [what for *_, what, _ in notes(tmp_path, threading.main_thread().native_id or 0)] == ["made", "initialised on cuda:0", "made"]
    backend: Any = made[0].backends["cuda"]
    assert backend.made_with.config.blocking == 1


def test_what_was_begun_is_aborted_when_initialising_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()

    class Lost(FakeNccl):
        def eager_connect_single_device(self, device: torch.device | None) -> None:
            raise dist.DistBackendError("remote process exited or there was a network error")

        def abort(self) -> None:
            aborted.set()

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Lost)
    with pytest.raises(dist.DistBackendError):
        comm.build(comm.kinds_of("g", "cpu:gloo,cuda:nccl"), dist.HashStore(), 0, 1, MINUTE)
    assert aborted.wait(10)


class Second(FakeNccl):
    """Torch's second implementation: it connects nothing until it is reconfigured."""

    peers: tuple[str, ...] = ()

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        raise AssertionError("initialised without a limit of time")

    def get_reconfigure_handle(self) -> str:
        return f"handle of {self.rank()}"

    def reconfigure(self, options: Any) -> Any:
        assert self.made_with.enable_reconfigure and (options.uuid, options.timeout) == (1, comm_gloo.BUILD_TIMEOUT)  # type: ignore[attr-defined]
        self.peers = tuple(options.handles)
        return SimpleNamespace(wait=lambda: note_or_fail(self))


def note_or_fail(backend: Second) -> None:
    if backend.rank() == 2:
        raise dist.DistBackendError("remote process exited or there was a network error")


@pytest.mark.parametrize("name", ["nccl2", "nccl"])
def test_torchs_second_nccl_is_initialised_by_reconfiguration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Under its own name, and as what torch takes for ``nccl`` when it is told to. Of three members one fails, and aborts what it began."""
    monkeypatch.setattr(c10d, "ProcessGroupNCCL2", Second, raising=False)
    monkeypatch.setattr(native.c10d, "ReconfigureOptions", SimpleNamespace, raising=False)
    monkeypatch.setenv("TEST_NCCL_LOG", str(tmp_path))
    if name == "nccl":
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    kind, store = comm.kinds_of("g", f"cuda:{name}")["cuda"], dist.HashStore()

    def end(rank: int) -> tuple[str, ...]:
        like = Like(GPU, pairwise=True, lasting=lambda: pytest.fail("pairs have no communicators of their own here"))
        return kind.build(store, rank, 3, MINUTE, like)[0].peers  # type: ignore[no-any-return]

    with ThreadPoolExecutor(3) as pool:
        *made, failed = [pool.submit(end, rank) for rank in range(3)]
        assert {each.result() for each in made} == {("handle of 0", "handle of 1", "handle of 2")}
        with pytest.raises(dist.DistBackendError):
            failed.result()
    deadline = time.monotonic() + 20
    while not (aborted := [what for *_, what, _ in notes(tmp_path, os.getpid()) if what == "aborted"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(aborted) == 1


@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "ReconfigureOptions"), reason="torch reconfigures from 2.14 on")
def test_initialised_by_torchs_own_reconfiguration() -> None:
    """Over gloo's implementation of it."""
    store = dist.HashStore()

    def end(rank: int) -> list[float]:
        backend: Any = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, 2, timeout=MINUTE, enable_reconfigure=True)  # type: ignore[call-arg]
        native.connect(backend, dist.PrefixStore("h", store), rank, 2, MINUTE)
        numbers = torch.ones(2) * (rank + 1)
        backend.allreduce([numbers]).wait()
        return numbers.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(end, range(2))) == [[3.0, 3.0], [3.0, 3.0]]


# -- one group, two backends ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(BOTH, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def new(kinds: comm.Kinds) -> comm.Communicator:
    return comm.build(kinds, dist.HashStore(), 0, 1, MINUTE, Like(GPU))


@pytest.mark.parametrize("how", SWITCHES)
def test_each_device_has_its_own_backend_replaced(world: dist.ProcessGroup, how: str) -> None:
    kinds = comm.kinds_of("w", BOTH)
    switch: Any = SlotSwitch(world, kinds, fake=False) if how == "slot" else ShimSwitch(shim.load(), world, kinds, fake=False)
    name = world.group_name
    for _ in range(3):
        made = new(kinds)
        assert type(made.backends["cpu"]) is dist.ProcessGroupGloo and type(made.backends["cuda"]) is FakeNccl
        switch.install(made.backends)
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert ones.tolist() == [1.0, 1.0] and world.group_name == name
        behind = [world._get_backend(torch.device(device)) for device in ("cpu", "cuda")]
        if how == "slot":
            assert behind == [made.backends["cpu"], made.backends["cuda"]]
        else:
            assert [b.name() for b in behind] == ["gloo", made.backends["cuda"].name()]
            assert switch.idle == (1, 0)
    if how == "slot":
        assert switch.room == (240 - 6) // 2


@needs_shim
def test_a_process_loads_a_backend_once_however_often_its_script_runs() -> None:
    loaded: list[Like] = []
    made_up: Any = {"cpu": SimpleNamespace(NAME="made up", warm=loaded.append), "cuda": SimpleNamespace(NAME="another", warm=loaded.append)}
    done: set[str] = set()
    for _ in range(2):
        comm.warm([made_up, made_up], torch.device("cpu"), done)
    assert (len(loaded), done) == (2, {"made up", "another"})


def test_what_is_queued_counts_as_done_only_when_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("cpu:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        switch = ShimSwitch(shim.load(), dist.group.WORLD, comm.kinds_of("w", "cpu:nccl"), fake=False)
        assert switch.idle == (0,) and not switch.pairwise
        dist.all_reduce(torch.ones(1))
        assert (switch.idle, switch.settled, switch.started) == (None, False, 1)
        switch.complete()
        assert (switch.idle, switch.settled) == ((1,), True)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
        assert switch.idle is None
    finally:
        dist.destroy_process_group()


@needs_shim
def test_what_goes_in_a_batch_needs_no_connections_of_its_own(world: dist.ProcessGroup) -> None:
    """NCCL sends a batch over the group's communicator, so such a group is initialised beforehand. Only NCCL's part of a group counts."""
    switch, tensors = ShimSwitch(shim.load(), world, comm.kinds_of("w", BOTH), fake=False), [torch.ones(1)]
    gloo, nccl = switch._shims
    nccl.swap(FakeProcessGroup._create_internal(0, 1))
    gloo.swap(FakeProcessGroup._create_internal(0, 1))
    gloo.send(tensors, 0, 0)
    nccl._start_coalescing()
    nccl.recv(tensors, 0, 0)
    nccl.send(tensors, 0, 0)
    nccl._end_coalescing()
    assert switch.idle is None and not switch.pairwise
    nccl.send(tensors, 0, 0)
    assert switch.pairwise
    switch.install(new(comm.kinds_of("w", BOTH)).backends)
    assert switch.pairwise and switch.idle == (0, 0)


# -- graphs ---------------------------------------------------------------------------------------------------------------------------
def test_a_graph_with_collectives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def capture_begin(self, pool: object = None) -> None:
            pass

        def capture_end(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    called = [3]
    graphs.guard(lambda: called[0])
    graph = Graph()
    graph.capture_begin(pool=None)
    graph.capture_end()
    graph.capture_begin()
    called[0] += 1
    with pytest.raises(WorkerError, match="captured with collectives in it"):
        graph.capture_end()
    with graphs.apart_from_captures(0):
        pass


def test_captures_and_initialisations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = graphs._Turns()
    turns.capture(True)
    with pytest.raises(WorkerError, match=r"a CUDA graph has been captured for 0\.1 s"), turns.initialise(0.1):
        pass
    threading.Timer(0.2, turns.capture, [False]).start()
    with turns.initialise(20), turns.initialise(20):  # several at a time
        monkeypatch.setattr(graphs, "_HELD_S", 0.2)
        began = time.monotonic()
        turns.capture(True)
        assert 0.2 <= time.monotonic() - began < 10, "it is held back, but not by what hangs"
    turns.capture(False)
    monkeypatch.setattr(graphs, "_HELD_S", 20)
    with turns.initialise(0):
        waiting = threading.Thread(target=turns.capture, args=[True])
        waiting.start()
        time.sleep(0.1)
        assert not turns._capturing
    waiting.join(10)
    assert turns._capturing


def test_nothing_is_initialised_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_nccl, "BUILD_TIMEOUT", timedelta(seconds=0.1))
    monkeypatch.setattr(graphs, "apart_from_captures", (turns := graphs._Turns()).initialise)
    turns.capture(True)
    with pytest.raises(WorkerError, match="no communicator can be initialised"):
        new(comm.kinds_of("w", "nccl"))
    turns.capture(False)
    new(comm.kinds_of("w", "nccl"))


@needs_shim
def test_a_graph_with_collectives_is_found_in_a_rehearsal_too() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    switching = ShimSwitching(shim.load())
    try:
        assert dist.group.WORLD is not None
        switching.rehearse(True)
        switch = switching.new(dist.group.WORLD, comm.CONTROL, fake=True)
        dist.all_reduce(torch.ones(1))
        assert (switch.called, switch.started, switch.idle) == (1, 0, (0,))
    finally:
        switching.rehearse(False)
        dist.destroy_process_group()


# -- whole jobs -----------------------------------------------------------------------------------------------------------------------
MANY = Path(__file__).with_name("many_groups.py")


def test_a_drain_then_a_crash(tmp_path: Path, nursery: Nursery) -> None:
    """Only what has to be replaced is touched; and what is replaced gives its memory back before the next one is used."""
    if shim.load() is None:
        pytest.skip("run `python -m tmrun.worker.shim` first")
    die, log = tmp_path / "die", tmp_path / "nccl"
    die.mkdir()
    log.mkdir()
    environment = {"TEST_DIE": str(die), "TEST_NCCL_LOG": str(log), ENV_SWITCH: "shim", "TMRUN_TEST_RETIRE_S": "0"}
    job = Cluster(tmp_path, 4, ["--steps", "40"], environment, MANY)
    job.nursery = nursery
    try:
        drained, healed = job.standby(3), job.standby(1)
        job.start()
        job.reach(6)
        stop = job.drain(3, drained)
        job.reach(stop + 2)
        (die / "world-1").touch()
        job.died(1)
        (die / "world-1").unlink()
        target = job.heal({1: healed})
        job.finish()
        kept = {rank: set(job.expect(job.ranks[rank], wire.Prepared, migration=2).kept) for rank in (0, 2, 3)}
        assert kept[0] == set() and len(kept[2]) == len(kept[3]) == 1, "the pair that this step did not use"
        for rank in (0, 2):
            told = notes(log, job.ranks[rank].pid)
            seen = used(job, rank)
            assert_frees_before_use(told, stop, seen, drained=True)
            assert_frees_before_use(told, target, seen, drained=False)
            before, after, lost, found = seen[stop - 1], seen[stop], seen[target - 1], seen[target]
            assert {n for n in before if before[n] != after[n]} == {n for n in after if "3" in ranks_of(n)}
            assert {n for n in lost if lost[n] == found[n]} == {n for n in found if name(n) in kept[rank]}
            aborted = {serial for _, serial, what, _ in told if what == "aborted"}
            assert not aborted & {int(marks[0]) for marks in seen[39].values()}, "what is in use to the end was never aborted"
    finally:
        job.close()


def used(job: Cluster, rank: int) -> dict[int, dict[str, list[str]]]:
    import json

    lines = (job.losses / f"groups{rank}.txt").read_text().splitlines()
    return {step: groups for step, _, groups in map(json.loads, lines)}


def ranks_of(group: str) -> list[str]:
    return group.split("/")[0].split(",")


def name(group: str) -> str:
    return group.split("/")[1]


def assert_frees_before_use(
    told: list[tuple[float, int, str, int]], step: int, seen: dict[int, dict[str, list[str]]], *, drained: bool
) -> None:
    """Around a switch: every new communicator was initialised, then every old one aborted, then the step ran. In a drain the first happens
    in the steps before."""

    def of(what: str, start: int = 0) -> dict[int, int]:
        """When it happened to each communicator."""
        return {serial: i for i, (_, serial, said, _) in enumerate(told) if said.startswith(what) and i >= start}

    at = max(i for i, (*_, what, _) in enumerate(told) if what == f"step {step}")
    stopped = max(i for i, (*_, what, _) in enumerate(told[:at]) if what.startswith("step"))
    changed = [n for n in seen[step] if n in seen[step - 1] and seen[step - 1][n] != seen[step][n]]
    old, new = ({int(seen[s][n][0]) for n in changed} for s in (step - 1, step))
    aborted, initialised = of("aborted", stopped), of("initialised")
    assert changed and old <= aborted.keys() and new <= initialised.keys()
    assert max(aborted[serial] for serial in old) < at, "the step ran before all memory was given back"
    assert max(initialised[serial] for serial in new) < (stopped if drained else at)


@pytest.mark.parametrize(("backend", "how"), [pytest.param("cpu:nccl", "shim", marks=needs_shim), (BOTH, "slot")])
def test_training_is_bitwise_the_same(cluster: Make, same: Same, tmp_path: Path, backend: str, how: str) -> None:
    """With the state moved over NCCL where that reaches the tensors: a communicator for a drain, the new world after a crash."""
    environment = {"TEST_BACKEND": backend, "TMRUN_SWITCH": how, "TEST_PACE_S": "0.05", "TMRUN_TEST_KILL": "0:14:backward"}
    (log := tmp_path / "nccl").mkdir()
    job = cluster(2, **environment, TEST_NCCL_LOG=str(log))
    drained, healed = job.standby(1), job.standby(0)
    job.start()
    job.reach(4)
    job.drain(1, drained)
    job.died(0)
    assert job.heal({0: healed}) == 14
    same(job, unlogged=((0, 14),))
    for joiner in (drained, healed):
        received = {serial for _, serial, what, _ in notes(log, joiner.pid) if what == "receives"}
        aborted = {serial for _, serial, what, _ in notes(log, joiner.pid) if what == "aborted"}
        assert len(received) == (backend != BOTH)
        alone = [what for _, _, what, members in notes(log, joiner.pid) if members == 1]
        where = "cuda:0" if backend == BOTH else "cpu"  # though the state is on the CPU in both
        assert alone[:3] == ["made", f"initialised on {where}", "aborted"], "a standby loads NCCL before it waits"
        assert bool(received & aborted) == (joiner is drained and backend != BOTH), "the drain's own is given back"
