"""What travels to a successor, and how: every kind of state, in place, exact, or an error that says what does not fit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tmrun
from tmrun.core.errors import WorkerError
from tmrun.worker import rng, suspects, transfer, values
from tmrun.worker.state import State

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "two groups": lambda p: torch.optim.AdamW([{"params": list(p)[:1], "lr": 0.1}, {"params": list(p)[1:], "weight_decay": 0.0}]),
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "LBFGS")
    },
}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def state_of(**registered: Any) -> State:
    state = State()
    state.register(registered)
    return state


def move(source: State, target: State) -> None:
    parcel, _ = transfer.pack(source, {"objects": source.encoded_objects()})
    target.put_objects(transfer.unpack(target, parcel)["objects"])


@pytest.mark.parametrize("rehearsed", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind: str, rehearsed: int) -> None:
    models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    train(models[0], optimizers[0], 0, 5)
    train(models[1], optimizers[1], 100, 100 + rehearsed)
    move(*(state_of(model=m, optimizer=o) for m, o in zip(models, optimizers, strict=True)))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 5, 8)
    assert_equal(*(m.state_dict() for m in models))
    assert_equal(*(o.state_dict()["state"] for o in optimizers))


def assert_equal(one: Any, other: Any) -> None:
    assert values.encode(in_order(one)) == values.encode(in_order(other))


def in_order(tree: Any) -> Any:
    return {k: in_order(v) for k, v in sorted(tree.items())} if isinstance(tree, dict) else tree


def test_several_optimizers_and_the_rest() -> None:
    """Schedulers, a grad scaler, an average, generators."""

    def build(seed: int) -> tuple[State, Callable[[], list[Any]]]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        one, two = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            one, [torch.optim.lr_scheduler.LinearLR(one), torch.optim.lr_scheduler.StepLR(one, 2)], [2]
        )
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(two, patience=1)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        mine, theirs, third = torch.Generator().manual_seed(seed), random.Random(seed), numpy.random.default_rng(seed)

        def step() -> list[Any]:
            loss = model(torch.randn(4, 3, generator=mine) * theirs.random() + third.random()).square().sum()
            one.zero_grad(), two.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(one), scaler.step(two)
            scaler.update()
            average.update_parameters(model)
            schedule.step(), plateau.step(loss.item())
            return [loss.item(), one.param_groups[0]["lr"], two.param_groups[0]["lr"], scaler.get_scale(), average.state_dict()]

        registered = {
            "model": model, "average": average, "one": one, "two": two, "schedule": schedule, "plateau": plateau, "scaler": scaler,
            "mine": mine, "theirs": theirs, "third": third,
        }  # fmt: skip
        for _ in range(3):
            step()
        return state_of(**registered), step

    (source, here), (target, there) = build(1), build(2)
    for _ in range(2):
        here()
    move(source, target)
    for _ in range(4):
        assert_equal(here(), there())


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: {"model": torch.nn.Linear(3, 4)}, "model.weight is"),
        (lambda: {"model": torch.nn.Linear(3, 2, dtype=torch.float64)}, "model.weight is"),
        (lambda: {"model": torch.nn.Linear(3, 2, bias=False)}, "model.bias exists only in the running job"),
        (lambda: {"net": torch.nn.Linear(3, 2)}, "registered objects differ"),
    ],
)
def test_what_does_not_fit_is_named(other: Callable[[], dict[str, Any]], named: str) -> None:
    with pytest.raises(WorkerError, match=named):
        move(state_of(model=torch.nn.Linear(3, 2)), state_of(**other()))


def test_buffers_are_used_again() -> None:
    state = state_of(model=torch.nn.Linear(64, 64))
    first, _ = transfer.pack(state, {})
    second, _ = transfer.pack(state, {}, first)
    assert [b.data_ptr() for b in second.buckets] == [b.data_ptr() for b in first.buckets]


# -- data ---------------------------------------------------------------------------------------------------------------------------
class Noisy(Dataset[torch.Tensor]):
    """Draws from the random state of whatever process it is in."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(11):
            yield torch.tensor([float(index), torch.rand(()).item()])


LOADERS: dict[str, Callable[[], DataLoader[torch.Tensor]]] = {
    "shuffled": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "distributed": lambda: DataLoader(
        Noisy(), batch_size=2, sampler=torch.utils.data.DistributedSampler(Noisy(), num_replicas=2, rank=1, seed=3)
    ),
    "streamed": lambda: DataLoader(Stream(), batch_size=2),
    "workers": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=2),
}


def draw(batches: tmrun.Batches[torch.Tensor], count: int) -> list[Any]:
    """Batches, and random numbers between them as dropout would draw."""
    drawn = []
    for _ in range(count):
        batch = next(batches)
        drawn += [batch.tolist(), torch.rand(()).item()]
        batch.zero_()
    return drawn


@pytest.fixture(params=LOADERS)
def loader(request: pytest.FixtureRequest) -> Callable[[], DataLoader[torch.Tensor]]:
    return LOADERS[request.param]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("before", [0, 1, 4, 5, 13])
def test_a_redo_draws_the_same(loader: Callable[[], DataLoader[torch.Tensor]], before: int) -> None:
    torch.manual_seed(5)
    batches = tmrun.Batches(loader())
    draw(batches, before)
    place, random_state = batches.state_dict(), rng.capture()
    once = draw(batches, 3)
    for _ in range(2):
        batches.load_state_dict(place)
        rng.restore(random_state)
        assert draw(batches, 3) == once
    rest = draw(batches, 8)

    torch.manual_seed(5)
    assert draw(tmrun.Batches(loader()), before + 11)[2 * before :] == once + rest


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("before", [0, 3, 8])
def test_a_successor_goes_on(loader: Callable[[], DataLoader[torch.Tensor]], before: int) -> None:
    torch.manual_seed(5)
    batches = tmrun.Batches(loader())
    draw(batches, before)
    place, random_state = values.decode(values.encode(batches.state_dict())), rng.capture()
    wanted = draw(batches, 9)
    torch.manual_seed(99)
    successor = tmrun.Batches(loader())
    draw(successor, 3)
    successor.load_state_dict(place)
    rng.restore(random_state)
    assert draw(successor, 9) == wanted


@pytest.mark.filterwarnings("ignore:.*is deprecated, please do not call")
def test_a_stateful_loader_needs_no_wrapper() -> None:
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

    def build() -> Any:
        return stateful_dataloader.StatefulDataLoader(Noisy(), batch_size=2, sampler=range(11))

    loader = build()
    iterator = iter(loader)
    next(iterator), next(iterator)
    source, target = state_of(loader=loader), state_of(loader=build())
    target.put_objects(copy.deepcopy(source.encoded_objects()))
    assert next(iter(target.objects["loader"]))[:, 0].tolist() == next(iterator)[:, 0].tolist()


# -- what nobody registered ---------------------------------------------------------------------------------------------------------
def test_what_looks_forgotten() -> None:
    model = torch.nn.Linear(3, 2)
    wrapped, average = torch.nn.Sequential(model), AveragedModel(model)
    one, two = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(average.parameters(), 0.1)

    class Trainer:
        def __init__(self) -> None:
            self.optimizer, self.model = two, model

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.state = inner, inner.state

    state = state_of(model=model, one=one)
    assert suspects.find(state, [{"m": model, "w": wrapped, "one": one, "nothing": None}]) == []
    assert suspects.find(state_of(model=model, wrapper=Wrapper(one)), [{"one": one}]) == []
    found = suspects.find(state, [{"trainer": Trainer(), "kept": {"ema": average}, "again": two}])
    assert found == ["trainer.optimizer (SGD)", "kept['ema'] (AveragedModel)"]
    assert suspects.steps_for(state, one)
    assert not suspects.steps_for(state, two)
