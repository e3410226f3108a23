"""What is recorded of a first step, and what a rehearsal is given; the collectives themselves are in ``every_use.py``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore

from tmrun import wire
from tmrun.worker import record


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def give(value: float) -> Any:
    """A collective that makes everything ``value``."""

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        tensor.fill_(value)

    return all_reduce


def gather(found: list[Any]) -> Any:
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = found

    return all_gather_object


def call(run: Any, made: Any, *args: Any) -> Any:
    run(made, args, {}) if isinstance(run.__self__, record.Recorder) else run(made, None, args, {})
    return args[0]


def test_every_output_is_a_parameter() -> None:
    for name, parameter in record.OUTPUT_OF.items():
        assert not hasattr(dist, name) or parameter in inspect.signature(getattr(dist, name)).parameters, name


def test_every_functional_collective_is_listed() -> None:
    """All that take a tensor and a group, or several tensors."""
    made = [f for f in vars(functional).values() if inspect.isfunction(f) and f.__module__ == functional.__name__ and f.__name__[0] != "_"]
    takes = {f.__name__: [*inspect.signature(f).parameters] for f in made}
    found = {name for name, names in takes.items() if names[:1] in (["self"], ["inputs"]) and "group" in names}
    assert found and found <= set(record.FUNCTIONAL)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [n for n in record.FUNCTIONAL if n.endswith("_autograd") or n == "permute_tensor"])
def test_functional_collectives_with_gradients(name: str) -> None:
    """Replayed once, and gradients still flow."""
    world, made = dist.group.WORLD, getattr(functional, name)
    more: dict[str, Any] = {
        "gather_dim": 0, "scatter_dim": 0, "reduceOp": "sum", "output_split_sizes": None, "input_split_sizes": None, "src_dst": [0],
    }  # fmt: skip
    given = {key: value for key, value in more.items() if key in inspect.signature(made).parameters}

    def output(run: Any, x: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = run(made, (x,), {**given, "group": world})
        return got

    recorder = record.Recorder()
    live = output(recorder.run, torch.full((4,), 3.0))
    replay, x = record.Replay(lambda: recorder.tape), torch.zeros(4, requires_grad=True)
    rehearsed = output(lambda call, args, kwargs: replay.run(call, None, args, kwargs), x)
    assert rehearsed.tolist() == live.tolist() == [3.0] * 4
    assert (replay.replayed, dict(replay.synthesised), replay.called) == (1, {}, {f"functional.{name}"})
    rehearsed.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 4


def test_calls_are_known_by_phase_and_order() -> None:
    recorder = record.Recorder()
    call(recorder.run, give(1), torch.zeros(2))
    recorder.begin_step()
    call(recorder.run, give(2), torch.zeros(2))
    call(recorder.run, give(3), torch.zeros(2))
    replay = record.Replay(lambda: recorder.tape)
    assert call(replay.run, give(0), torch.zeros(2)).tolist() == [1, 1]
    for _ in range(2):  # every rehearsed step is given the first one
        replay.begin_step()
        assert [call(replay.run, give(0), torch.zeros(2)).tolist() for _ in range(2)] == [[2, 2], [3, 3]]
    assert call(replay.run, give(7), torch.zeros(2)).tolist() == [7, 7]
    assert (replay.replayed, dict(replay.synthesised)) == (5, {"all_reduce": 1})


def test_what_torch_puts_off_is_not_recorded() -> None:
    """Over NCCL a receive in a batch gives no Work, and nothing has arrived when it returns."""

    def irecv(tensor: torch.Tensor, src: int | None = None, group: Any = None) -> None:
        if dist.group.WORLD not in c10d._world.pg_coalesce_state:
            tensor.fill_(5)

    def first_step(run: Any) -> list[float]:
        with c10d._coalescing_manager():
            batched = call(run, irecv, torch.full((1,), 7.0)).item()
        return [batched, call(run, irecv, torch.zeros(1)).item()]

    recorder = record.Recorder()
    assert first_step(recorder.run) == [7, 5]
    assert len(recorder.tape) == 1
    replay = record.Replay(lambda: recorder.tape)
    assert [call(replay.run, irecv, torch.ones(1)).item() for _ in range(2)] == [0, 5], "an ordinal is an ordinal, recorded or not"


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_what_torch_coalesces_is_not_waited_for(name: str) -> None:
    """Such a call gives a Work that cannot be waited for; only the manager's can."""
    outputs = [torch.zeros(1)] * (name != "all_reduce")

    def step(run: Any) -> float:
        x = torch.full((1,), 3.0)
        with c10d._coalescing_manager(async_ops=True) as manager:
            run(getattr(dist, name), (*outputs, x), {"async_op": True})
        manager.wait()
        return float((outputs or [x])[0])

    recorder = record.Recorder()
    replay = record.Replay(lambda: recorder.tape)
    assert step(recorder.run) == step(lambda call, args, kwargs: replay.run(call, None, args, kwargs)) == 3
    assert (recorder.tape, dict(replay.synthesised)) == ({}, {name: 1})


def test_what_does_not_fit_is_synthesised() -> None:
    recorder = record.Recorder()
    call(recorder.run, give(1), torch.zeros(2))
    replay = record.Replay(lambda: recorder.tape)
    assert call(replay.run, give(0), torch.zeros(3)).tolist() == [0, 0, 0]


def test_of_a_large_tensor_the_beginning_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.ENV_RECORD_BYTES, "8")

    def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
        tensor.copy_(torch.arange(6.0).view(2, 3) + 1)

    recorder = record.Recorder()
    call(recorder.run, all_reduce, torch.zeros(2, 3))
    replay = record.Replay(lambda: recorder.tape)
    assert call(replay.run, give(0), torch.zeros(2, 3)).tolist() == [[1, 2, 1], [2, 1, 2]]


def test_objects_that_are_no_plain_values_are_not_recorded() -> None:
    recorder = record.Recorder()
    call(recorder.run, gather([object()]), [None], None)
    assert recorder.tape == {}
    call(recorder.run, gather([{"files": ["a"]}]), [None], None)
    assert len(recorder.tape) == 1


def test_a_tape_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.ENV_RECORD_BYTES, str(1 << 30))
    recorder = record.Recorder()
    for _ in range(3):
        call(recorder.run, give(1), torch.zeros(200_000))
    assert len(recorder.tape) == 2
    assert recorder.full


def test_nothing_is_recorded_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_CALLS", 3)
    recorder = record.Recorder()
    for _ in range(3):
        assert not recorder.full
        call(recorder.run, give(1), torch.zeros(1))
    assert recorder.full


@pytest.mark.parametrize("largest", ["64", "4"])
def test_functional_collectives_and_asynchronous_ones(monkeypatch: pytest.MonkeyPatch, largest: str) -> None:
    """With a group of one, a rehearsal on other inputs is given the recorded outputs (of which 4 bytes are the beginning)."""
    monkeypatch.setenv(wire.ENV_RECORD_BYTES, largest)
    recorder, world = record.Recorder(), dist.group.WORLD

    def outputs(run: Any, x: torch.Tensor) -> list[list[float]]:
        y = x.clone()
        for work in (run(dist.all_reduce, (y,), {"async_op": True}), run(dist.barrier, (), {"async_op": True})):
            work.wait()
        return [
            y.tolist(),
            run(functional.all_gather_single, (x, 0, world), {}).tolist(),
            run(functional.all_reduce, (x, "sum", world), {}).tolist(),
        ]

    live = outputs(recorder.run, torch.full((4,), 3.0))
    replay = record.Replay(lambda: recorder.tape)
    assert outputs(lambda call, args, kwargs: replay.run(call, None, args, kwargs), torch.zeros(4)) == live == [[3.0] * 4] * 3
    assert (replay.replayed, dict(replay.synthesised)) == (3, {})


def test_what_is_received_without_a_record_is_zeros_even_where_gradients_begin() -> None:
    def irecv(tensor: torch.Tensor, src: int | None = None, group: Any = None) -> None:
        """Leaves what is there."""

    replay = record.Replay(lambda: None)
    assert call(replay.run, irecv, torch.ones(2, requires_grad=True)).tolist() == [0, 0]
