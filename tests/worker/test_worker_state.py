"""What travels to a successor, and how: every kind of state, in place, exact, or an error that says what does not fit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

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
}
CLASSES = {name: each for name, each in vars(torch.optim).items() if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)}
del CLASSES["Optimizer"]
OPTIMIZERS |= CLASSES
"""All that this torch has."""


class Looked(torch.nn.Module):
    """Its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().mul(4).long() % 8)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"SparseAdam": Looked, "Muon": lambda: torch.nn.Linear(3, 2, bias=False)}
"""For those that do not take every parameter."""


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
    models = [MODELS.get(kind, lambda: torch.nn.Linear(3, 2))() for _ in range(2)]
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


# -- redo ---------------------------------------------------------------------------------------------------------------------------
class Momentum(torch.nn.Module):
    """One network, its slow copy, and a queue, each changed in every forward in one of the ways that scripts do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.count = how, 0
        self.fast, self.slow = (torch.nn.Linear(200, 200) for _ in range(2))
        self.slow.requires_grad_(False)
        self.register_buffer("queue", torch.arange(40000.0).reshape(200, 200))
        self.register_buffer("counter", None)
        self.register_buffer("float8", torch.zeros(300, 300).to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("complex", torch.zeros(200, 200, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            mixed = slow.data * 0.9 + fast.data * 0.1
            if self.how == "in place":
                with torch.no_grad():
                    slow.copy_(mixed)
            elif self.how == "through data":
                slow.data.copy_(mixed)
            else:
                slow.data = mixed
        row = self.fast(x).detach()
        self.counter = None if self.counter is not None else row[:1].clone()
        if self.how == "filled":
            self.queue.data.fill_(float(self.queue[0, 0] + 1))
        elif self.how == "rolled":
            self.queue.data.copy_(self.queue.roll(1))
        elif self.how == "grown":
            self.queue.data = torch.cat([self.queue, row[None]])
        elif self.how == "resized":
            self.queue.resize_(len(self.queue) - 1, 200)
        elif self.how == "in place":
            self.queue[0] = row
        elif self.how == "through data":
            self.queue.data[0] = row
        else:
            self.queue = torch.cat([row[None], self.queue[1:]])
        self.complex.data[0] += row
        return (self.fast(x) * self.slow(x)).sum() + self.queue.sum()


@pytest.mark.parametrize("step", [1, 2, 5, 150])
@pytest.mark.parametrize("how", ["in place", "through data", "assigned", "filled", "rolled", "grown", "resized"])
def test_what_forward_changes_is_undone(how: str, step: int) -> None:
    torch.manual_seed(0)
    model = Momentum(how)
    model.register_buffer("nowhere", torch.zeros(200, 200, device="meta"), persistent=False)
    with torch.inference_mode():
        model.register_buffer("inferred", torch.zeros(300, 300), persistent=False)
    model.add_module("empty", torch.nn.Linear(3, 3, device="meta").requires_grad_(False))
    model.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)
    optimizer = torch.optim.SGD(model.fast.parameters(), 0.01)
    state = state_of(model=model, optimizer=optimizer)
    for number in range(step):
        state.snapshot()
        model(torch.full((200,), 0.01 * number)).backward()
        optimizer.step()

    def content() -> bytes:
        return values.encode([{k: v for k, v in model.state_dict().items() if "empty" not in k}, model.counter, model.inferred.clone()])

    before = content()
    kept = state.snapshot()
    model(torch.ones(200)).backward()
    with torch.inference_mode():
        model.inferred += 1
    assert content() != before
    state.rollback(kept)
    assert content() == before


@pytest.mark.parametrize("crash", range(12))
def test_networks_that_are_frozen_in_turns(crash: int) -> None:
    """Each as usual while the other one learns: what a step trained stays trained when the next one is run again."""
    results = []
    for broken in (False, True):
        torch.manual_seed(0)
        networks = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
        optimizers = [torch.optim.Adam(network.parameters()) for network in networks]
        state = state_of(one=networks[0], two=networks[1], first=optimizers[0], second=optimizers[1])
        for step in range(12):
            kept = state.snapshot()
            for again in (True, False) if broken and step == crash else (False,):
                learns = step % 2
                networks[1 - learns].requires_grad_(False)
                networks[learns].requires_grad_(True)
                (networks[0](torch.ones(3)) * networks[1](torch.ones(3) * step)).square().sum().backward()
                if again:
                    state.rollback(kept)
            optimizers[learns].step()
            optimizers[learns].zero_grad()
        results.append([network.state_dict() for network in networks])
    assert_equal(*results)


def test_frozen_in_the_middle_of_a_run() -> None:
    model, average = torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)
    state = state_of(model=model, average=average)
    for step in range(30):
        kept = state.snapshot()
        if step == 10:
            average.requires_grad_(False)
        if step > 10:
            average.weight.add_(1)
    before = average.weight.clone()
    state.rollback(kept)
    assert torch.equal(average.weight, before - 1)


def test_what_is_frozen_takes_no_memory_until_it_changes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)).requires_grad_(False)
    state = state_of(model=model)
    for _ in range(5):
        kept = state.snapshot()
    assert [k for k in state.untrained._kept if k.content is not None] == []
    model[1].weight.add_(1)
    with pytest.raises(
        WorkerError, match=r"model\.1\.weight, which is frozen, changed for the first time in a step that has to be run again"
    ):
        state.rollback(kept)
    state.snapshot()
    assert sum(k.content is not None for k in state.untrained._kept) == 1
    move(state, state)
    state.snapshot()
    assert sum(k.content is not None for k in state.untrained._kept) == 1


@pytest.mark.parametrize("how", ["in place", "through data", "assigned"])
def test_a_joiner_knows_what_changes(how: str) -> None:
    source, target = (state_of(model=Momentum(how)) for _ in range(2))
    for _ in range(4):
        source.snapshot()
        source.modules["model"](torch.ones(200))
    target.untrained.adopt(values.decode(values.encode(source.untrained.found)))
    move(source, target)
    kept = target.snapshot()
    before = values.encode(target.modules["model"].state_dict())
    target.modules["model"](torch.ones(200))
    target.rollback(kept)
    assert values.encode(target.modules["model"].state_dict()) == before


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_had_unscaled(fused: bool) -> None:
    def train(model: torch.nn.Module, optimizer: Any, scaler: Any, broken: State | None) -> list[Any]:
        for number in range(4):
            kept = broken.snapshot() if broken is not None and number == 2 else None
            for again in (True, False) if kept is not None else (False,):
                optimizer.zero_grad()
                scaler.scale(model(torch.full((3,), 1.0 + number)).square().sum()).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if again:
                    optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.ones(1)  # lent for the time of an update
                    broken.rollback(kept)
            scaler.step(optimizer)
            scaler.update()
        return [model.state_dict(), optimizer.state_dict()["state"], scaler.state_dict()]

    results = []
    for broken in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        state = state_of(model=model, optimizer=optimizer, scaler=scaler)
        results.append(train(model, optimizer, scaler, state if broken else None))
    assert_equal(*results)


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
    "own generator": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, generator=torch.Generator()),
    "drawn as it goes": lambda: DataLoader(Noisy(), batch_size=2, sampler=RandomSampler(Noisy(), True, 77, torch.Generator())),
    "in the batch sampler": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy(), generator=torch.Generator()), 2, False)
    ),
    "stateful": lambda: stateful(batch_size=2, shuffle=True),
    "stateful, own generator": lambda: stateful(batch_size=2, shuffle=True, generator=torch.Generator()),
    "stateful workers": lambda: stateful(batch_size=2, shuffle=True, num_workers=2),
    "makes its own": lambda: DataLoader(Noisy(), batch_size=2, sampler=Lazy()),
    "in a wrapped sampler": lambda: DataLoader(Noisy(), batch_size=2, sampler=Wrapped(RandomSampler(Noisy(), generator=torch.Generator()))),
}
BY = ", by state"
BY_STATE: dict[str, Callable[[], Any]] = {
    "stateful": lambda: stateful(batch_size=2, shuffle=True),
    "stateful, own generator": lambda: stateful(batch_size=2, shuffle=True, generator=torch.Generator()),
    "all stateful": lambda: stateful(Counted(), batch_size=2),
    "all stateful, workers": lambda: stateful(Counted(), batch_size=2, num_workers=2, generator=torch.Generator()),
}


class Lazy(Sampler[int]):
    """Has no generator before its first use."""

    generator: torch.Generator | None

    def __init__(self) -> None:
        self.generator = None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(4)
        return iter(torch.randperm(11, generator=self.generator).tolist())


class Wrapped(Sampler[int]):
    def __init__(self, inner: Sampler[int]) -> None:
        self.inner, self.random = inner, random.Random(3)

    def __iter__(self) -> Iterator[int]:
        indices = list(self.inner)
        self.random.shuffle(indices)
        return iter(indices)


def batches_of(loader: str) -> tmrun.Batches[torch.Tensor]:
    if loader.endswith(BY):
        return tmrun.Batches(BY_STATE[loader.removesuffix(BY)](), by_state=True)
    return tmrun.Batches(LOADERS[loader]())


class Counted(IterableDataset[torch.Tensor]):
    """Knows where it is, and has random numbers of its own."""

    def __init__(self) -> None:
        self.at, self.random, self.began = 0, torch.Generator(), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.began += 1
        self.at = self.at % 11
        while self.at < 11:
            self.at += 1
            yield torch.tensor([float(self.at), torch.rand((), generator=self.random).item()])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.random.set_state(state["random"])


def stateful(dataset: Any = None, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is deprecated, please do not call")
        return module.StatefulDataLoader(Noisy() if dataset is None else dataset, **options)


def draw(batches: tmrun.Batches[torch.Tensor], count: int) -> list[Any]:
    """Batches, and random numbers between them as dropout would draw."""
    drawn = []
    for _ in range(count):
        batch = next(batches)
        drawn += [batch.tolist(), torch.rand(()).item()]
        batch.zero_()
    return drawn


@pytest.fixture(params=[*LOADERS, *(f"{name}{BY}" for name in BY_STATE)])
def loader(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("before", [0, 1, 4, 5, 13])
def test_a_redo_draws_the_same(loader: str, before: int) -> None:
    torch.manual_seed(5)
    batches = batches_of(loader)
    draw(batches, before)
    place, random_state = batches.state_dict(), rng.capture()
    once = draw(batches, 3)
    for _ in range(2):
        batches.load_state_dict(place)
        rng.restore(random_state)
        assert draw(batches, 3) == once
    rest = draw(batches, 8)

    torch.manual_seed(5)
    assert draw(batches_of(loader), before + 11)[2 * before :] == once + rest


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("before", [0, 3, 8])
def test_a_successor_goes_on(loader: str, before: int) -> None:
    torch.manual_seed(5)
    batches = batches_of(loader)
    draw(batches, before)
    place, random_state = values.decode(values.encode(batches.state_dict())), rng.capture()
    wanted = draw(batches, 9)
    torch.manual_seed(99)
    successor = batches_of(loader)
    draw(successor, 3)
    successor.load_state_dict(place)
    rng.restore(random_state)
    assert draw(successor, 9) == wanted


def test_as_many_as_it_keeps_are_not_drawn_again() -> None:
    served: list[Any] = []
    batches = tmrun.Batches(DataLoader(Noisy(), collate_fn=lambda items: served.append(items) or items[0]), keep=2)
    next(batches)
    place = batches.state_dict()
    once = [next(batches).tolist() for _ in range(2)]
    batches.load_state_dict(place)
    assert [next(batches).tolist() for _ in range(2)] == once
    assert len(served) == 3


def test_a_place_from_before_an_epochs_end() -> None:
    """With a generator of its own, and nobody who draws from torch's."""
    batches = tmrun.Batches(DataLoader(range(6), batch_size=2, shuffle=True, generator=torch.Generator()))
    next(batches), next(batches)
    place = batches.state_dict()
    once = [next(batches).tolist() for _ in range(3)]
    batches.load_state_dict(place)
    again = batches.state_dict()
    assert [next(batches).tolist() for _ in range(3)] == once
    successor = tmrun.Batches(DataLoader(range(6), batch_size=2, shuffle=True, generator=torch.Generator()))
    successor.load_state_dict(again)
    assert [next(successor).tolist() for _ in range(3)] == once


def test_a_stateful_loader_goes_on_without_drawing_again() -> None:
    batches = tmrun.Batches(stateful(Counted(), batch_size=1), by_state=True)
    draw(batches, 4)
    successor = tmrun.Batches(stateful(Counted(), batch_size=1), by_state=True)
    served: list[Any] = []
    successor.loader.collate_fn = lambda items: served.append(items) or items[0]
    successor.load_state_dict(values.decode(values.encode(batches.state_dict())))
    assert next(successor)[0] == 5
    assert len(served) == 1


def test_a_loader_is_registered_in_batches() -> None:
    """Its own position counts from its next iterator on only, not in the one that a loop holds."""
    with pytest.raises(WorkerError, match=r"join\(loader=\.\.\.\): give it as tmrun\.Batches\(loader\)"):
        tmrun.join(loader=stateful(batch_size=1))


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
