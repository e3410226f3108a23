"""Gradients between steps: the same tensors again where a script keeps them, and none of an earlier step in an update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tmrun.core.errors import WorkerError
from tmrun.worker import gradients, graphs, intercept, values
from tmrun.worker.state import State

Net = torch.nn.Module
Optimizer = torch.optim.Optimizer


class Script:
    """A network, an optimizer and a state that notes as the runtime does."""

    def __init__(self, *, flat: bool = False, aged: str = "") -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 0.1)
        self.flat: torch.Tensor | None = None
        self.state = State()
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.state.register({"net": self.net, "optimizer": self.optimizer, "schedule": schedule})
        for number in range(20 if aged else 0):
            self.step(number, "anew" if flat else aged)
        if flat:
            parameters = list(self.net.parameters())
            self.flat = torch.zeros(sum(p.numel() for p in parameters))
            for p, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
                p.grad = part.view_as(p)

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self.net.parameters()]

    def backward(self, number: int) -> None:
        """The second layer has a part in every second step only."""
        self.state.gradients.before_backward()
        (self.net if number % 2 else self.net[0])(torch.full((2, 3), 1.0 + number)).square().sum().backward()

    def update(self) -> None:
        self.state.gradients.before_update(self.optimizer)
        self.optimizer.step()

    def zero(self, how: str) -> None:
        if self.flat is not None:
            self.flat.zero_()
        else:
            kept = self.net[0].bias.grad if how == "one in place" else None  # the one that no sample has
            self.optimizer.zero_grad(set_to_none="one" in how or how == "anew")
            self.net[0].bias.grad = self.net[0].bias.grad if kept is None else kept.zero_()

    def step(self, number: int, how: str, *, broken: bool = False) -> None:
        kept = self.state.snapshot()
        for again in (True, False) if broken else (False,):
            if "after" not in how:
                self.zero(how)
            self.backward(number)
            if self.flat is not None:
                self.flat *= 0.5  # as a reduction of the buffer would
            if again:
                self.state.rollback(kept)
                self.state.snapshot()
        self.update()
        if "after" in how:
            self.zero(how)

    def contents(self) -> bytes:
        return values.encode([self.net.state_dict(), self.optimizer.state_dict()])


HOW = ["anew", "one in place", "in place", "in place, after", "flat", "flat, after"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("crash", [0, 1, 2, 3])
@pytest.mark.parametrize("aged", [False, True])
def test_a_broken_step_runs_again(how: str, crash: int, aged: bool) -> None:
    undisturbed, broken = (Script(flat="flat" in how, aged=how if aged else "") for _ in range(2))
    for number in range(6):
        undisturbed.step(number, how)
        broken.step(number, how, broken=number == crash)
        assert broken.contents() == undisturbed.contents(), number


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("moved", [1, 2, 3])
@pytest.mark.parametrize("aged", [False, True])
def test_a_successor_goes_on(how: str, moved: int, aged: bool) -> None:
    """Its rehearsal went another way: it has gradients where there are none, and none where there are some."""
    undisturbed, leaver = (Script(flat="flat" in how, aged=how if aged else "") for _ in range(2))
    joiner = Script(flat="flat" in how)
    for number in (1, 2, 1):
        joiner.state.gradients.begin()
        joiner.zero("anew")
        joiner.backward(number)
        joiner.optimizer.step()
    joiner.state.gradients.drop_renewed()
    assert (joiner.gradients == [None] * 4) == ("flat" not in how), "a standby does not wait with gradients that nobody looks for"
    for number in range(moved):
        undisturbed.step(number, how)
        leaver.step(number, how)
    parcel = values.encode([leaver.net.state_dict(), leaver.optimizer.state_dict(), leaver.state.gradients.lasting()])
    net, optimizer, lasting = values.decode(parcel)
    joiner.net.load_state_dict(net)
    joiner.optimizer.load_state_dict(optimizer)
    joiner.state.gradients.adopt(lasting)
    if how == "anew":
        assert (moved < 3 and not aged) or joiner.gradients == [None] * 4, "what is made anew takes no memory before"
    for number in range(moved, moved + 4):
        undisturbed.step(number, how)
        joiner.step(number, how)
        assert joiner.contents() == undisturbed.contents(), number


def test_what_a_list_holds_is_found_again() -> None:
    script = Script()
    for number in range(2):
        script.step(number, "in place")
    held, kept = script.gradients, script.state.snapshot()
    script.optimizer.zero_grad()
    script.backward(1)
    script.state.rollback(kept)
    assert all(mine is theirs for mine, theirs in zip(script.gradients, held, strict=True))
    assert not any(gradient.any() for gradient in held if gradient is not None)


def test_a_successor_that_goes_back_before_its_first_step() -> None:
    script = Script(flat=True)
    views = script.gradients
    script.state.gradients.adopt(bytes([1] * 4))
    script.state.forget_step()
    script.state.gradients.adopt(bytes([1, 0, 1, 1]))
    assert [mine is view for mine, view in zip(script.gradients, views, strict=True)] == [True, False, True, True]


def test_a_second_loss_right_after_going_back() -> None:
    """To a snapshot, before the first step from there was over."""
    script = Script(aged="one in place")
    kept, lasting = script.net[0].bias.grad, script.state.gradients.lasting()
    for number in range(2):
        script.step(number, "one in place", broken=True)
        script.state.forget_step()
        script.state.gradients.adopt(lasting)
    script.step(0, "one in place", broken=True)
    script.step(1, "one in place", broken=True)
    assert kept is not None and script.net[0].bias.grad is kept


def test_all_are_noted_again_from_time_to_time() -> None:
    """Also when something asks for them in every step."""
    script = Script()
    noted = []
    for number in range(3 * gradients._LOOK + 2):
        script.step(number, "anew")
        noted.append(script.state.gradients._noted_all)
        script.state.gradients.lasting()
    assert sum(noted[gradients._FIRST :]) == 6


def test_other_parameters_than_in_the_running_job() -> None:
    with pytest.raises(WorkerError, match="5 parameters in the running job, 4 here"):
        Script().state.gradients.adopt(bytes(5))


# -- gradients that an earlier step has made ----------------------------------------------------------------------------------------
@contextlib.contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(WorkerError, match="a AdamW updates with gradients to which an earlier step has contributed"):
        yield


@pytest.mark.parametrize("flat", [False, True])
def test_a_micro_batch_a_step(flat: bool) -> None:
    script = Script(flat=flat)
    for number in range(3):
        script.state.snapshot()
        if number == 0:
            script.zero("in place")
        script.backward(number)
    with refused():
        script.update()


def test_later_too_once_a_step_has_not_updated() -> None:
    script = Script()
    for number in range(8):
        script.step(number, "anew")
    for number in range(2):
        script.state.snapshot()
        script.zero("anew") if number == 0 else None
        script.backward(number)
    with refused():
        script.update()


def test_an_update_before_the_step_has_made_any() -> None:
    script = Script()
    script.state.snapshot()
    script.update()
    script.backward(0)
    script.state.snapshot()
    with refused():
        script.update()


def test_a_step_without_an_update_whose_gradients_are_thrown_away() -> None:
    """As a scaler of gradients does that were infinite."""
    for how in HOW:
        script = Script(flat="flat" in how)
        for number in range(6):
            if number in (1, 3):
                script.state.snapshot()
                script.zero(how)
                script.backward(number)
                script.zero(how) if "after" in how else None
            else:
                script.step(number, how)


def test_networks_that_learn_in_turns() -> None:
    """The generator's step adds to the discriminator's gradients, which are set to zero before they are used."""
    for anew in (False, True):
        torch.manual_seed(0)
        nets = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
        state = State()
        state.register({"one": nets[0], "two": nets[1], "first": optimizers[0], "second": optimizers[1]})
        for number in range(8):
            state.snapshot()
            mine = optimizers[number % 2]
            mine.zero_grad(set_to_none=anew)
            state.gradients.before_backward()
            nets[1](nets[0](torch.ones(3))).sum().backward()
            state.gradients.before_update(mine)
            mine.step()


def test_a_closure_makes_its_own() -> None:
    script = Script()
    for number in range(4):
        script.state.snapshot()
        script.backward(1) if number % 2 else None  # of another network
        script.state.gradients.before_update(script.optimizer, closure=True)
        script.zero("in place")
        script.backward(1)
        script.optimizer.step()


def test_optimizers_are_judged_each_by_its_own_updates() -> None:
    """One that goes over to a micro-batch a step, beside one that goes on as before."""
    script, other = Script(), Script()
    script.state.register({"other net": other.net, "other": other.optimizer})
    for number in range(8):
        script.state.snapshot()
        for each in (script, other):
            if number < 5 or each is script:
                each.zero("anew")
            script.state.gradients.before_backward()
            each.net(torch.ones(2, 3)).sum().backward()
            script.state.gradients.before_update(each.optimizer) if number < 4 or each is script else None
    with refused():
        script.state.gradients.before_update(other.optimizer)


@pytest.mark.parametrize("used", [False, True])
def test_nobody_looks_for_ever(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """At gradients that a closure makes, or at those of an optimizer that has not begun to update."""
    looked: list[int] = []
    script, other = Script(), Script()
    script.state.register({"other net": other.net, "other": other.optimizer})
    monkeypatch.setattr(gradients, "_contents", lambda found: looked.append(number) or [False for _ in found])
    for number in range(40):
        script.step(number, "anew")
        if used:
            other.zero("in place")
            script.state.gradients.before_update(other.optimizer, closure=True)
            script.state.gradients.before_backward()
            other.net(torch.ones(2, 3)).sum().backward()
        assert script.state.gradients._noted_all == (used or number < gradients._FIRST)
    assert not looked


def test_a_few_show_that_gradients_have_been_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large network that is trained later than another one, but gets gradients from the start."""
    monkeypatch.setattr(gradients, "_SAMPLE", 2)
    script, other, looked = Script(), Script(), [0]
    contents = gradients._contents

    def look(found: Iterable[torch.Tensor]) -> list[bool]:
        found = [*found]
        looked[-1] += len(found)
        return contents(found)

    monkeypatch.setattr(gradients, "_contents", look)
    script.state.register({"other net": other.net, "other": other.optimizer})
    for _ in range(20):
        script.step(1, "anew")
        other.net(torch.ones(2, 3)).sum().backward()
        looked.append(0)
    assert looked[4:6] + looked[-3:-1] == [4, 4, 2, 2]
    script.step(1, "anew")
    with refused():
        script.state.gradients.before_update(other.optimizer)


# -- captured graphs, played ----------------------------------------------------------------------------------------------------------
class Captured(Script):
    """Its forward and backward pass are a graph from ``at`` on, captured in a step of its own; None: before its first step.

    A graph writes the tensors that were the gradients when it was captured, whatever they are by now, and no backward pass begins.
    """

    graph: list[torch.Tensor] | None = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int | None) -> None:
        super().__init__()
        self.at = at
        monkeypatch.setattr(graphs, "captured_backwards", lambda: len(CAPTURED))
        monkeypatch.setattr(gradients, "_capturing", lambda _: self.capturing)
        self.capturing = False
        if at is None:
            self.capture(1)

    def capture(self, number: int) -> None:
        self.zero("anew")
        self.capturing = True
        CAPTURED.append(self)
        super().backward(1)
        self.capturing = False
        self.graph = [p.grad for p in self.net.parameters() if p.grad is not None]

    def backward(self, number: int) -> None:
        if self.graph is None and number == self.at:
            self.capture(number)
        if self.graph is None:
            super().backward(1)
            return
        made = torch.autograd.grad(self.net(torch.full((2, 3), 1.0 + number)).square().sum(), list(self.net.parameters()))
        for static, gradient in zip(self.graph, made, strict=True):
            static.copy_(gradient)

    def zero(self, how: str) -> None:
        if self.graph is None:
            super().zero("anew")


CAPTURED: list[Captured] = []


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], Captured]]:
    yield lambda at: Captured(monkeypatch, at=at)
    CAPTURED.clear()


Make = Callable[[int | None], Captured]


@pytest.mark.parametrize("at", [None, 0, 1, 2])
def test_what_a_captured_backward_pass_writes_is_not_looked_at(captured: Make, at: int | None) -> None:
    """Even where other gradients are made beside it."""
    script, other = captured(at), Script()
    script.state.register({"other net": other.net, "other": other.optimizer})
    for number in range(6):
        script.state.snapshot()
        script.zero("")
        other.zero("anew")
        for each in (other, script) if number % 2 else (script, other):
            if each is other:
                script.state.gradients.before_backward()
                other.net(torch.ones(2, 3)).sum().backward()
            else:
                script.backward(number)
            script.state.gradients.before_update(each.optimizer)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CUDA graph without CUDA, and what catches it."""

    class Graph:
        def capture_begin(self) -> None:
            pass

        def capture_end(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(graphs._turns, "backwards", 0)
    graphs.guard(lambda: 0)
    intercept._catch_backward(cast(Any, SimpleNamespace(before_backward=lambda: None)))
    return Graph()


def test_a_micro_batch_a_step_that_is_compiled(graph: Any) -> None:
    """What torch captures are parts of passes that begin as ever."""
    script = Script()
    for number in range(4):
        script.state.snapshot()
        if number == 0:
            script.zero("anew")
        graph.capture_begin()
        graph.capture_end()
        script.backward(1)
    assert graphs.captured_backwards() == 0
    with refused():
        script.update()


def test_captured_backward_passes_are_counted(graph: Any) -> None:
    for _ in range(2):
        torch.ones(1, requires_grad=True).backward()
        graph.capture_begin()
        torch.ones(1, requires_grad=True).backward()
        graph.capture_end()
    assert graphs.captured_backwards() == 2


@pytest.mark.parametrize("crash", [0, 1, 2, 3, 9, 10, 11])
@pytest.mark.parametrize("at", [None, 0, 2, 9])
def test_a_broken_step_of_a_graph_runs_again(captured: Make, at: int | None, crash: int) -> None:
    undisturbed, broken = captured(at), captured(at)
    for number in range(13):
        undisturbed.step(number, "")
        broken.step(number, "", broken=number == crash)
        assert broken.contents() == undisturbed.contents(), number


@pytest.mark.parametrize("at", [None, 0, 1, 2])
@pytest.mark.parametrize("moved", [3, 4])
def test_a_successor_replays_its_own_graph(captured: Make, at: int | None, moved: int) -> None:
    """One that it has captured in its last rehearsed step too, or that the leaver has captured just now."""
    undisturbed, leaver, joiner = (captured(at) for _ in range(3))
    for number in range(3):
        joiner.state.gradients.begin()
        joiner.zero("")
        joiner.backward(number)
        joiner.optimizer.step()
    joiner.state.gradients.drop_renewed()
    for number in range(moved):
        undisturbed.step(number, "")
        leaver.step(number, "")
    joiner.net.load_state_dict(leaver.net.state_dict())
    joiner.optimizer.load_state_dict(values.decode(values.encode(leaver.optimizer.state_dict())))
    joiner.state.gradients.adopt(leaver.state.gradients.lasting())
    for number in range(moved, moved + 3):
        undisturbed.step(number, "")
        joiner.step(number, "")
        assert joiner.contents() == undisturbed.contents(), number


def test_going_back_to_before_a_capture(captured: Make) -> None:
    """The script does not capture again what it has."""
    script = captured(2)
    for number in range(4):
        if number == 2:
            lasting = script.state.gradients.lasting()
        script.step(number, "")
    script.state.forget_step()
    script.state.gradients.adopt(lasting)
    assert script.graph is not None
    assert all(mine is static for mine, static in zip(script.gradients, script.graph, strict=True))


# -- fully sharded ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sync", [False, True])
def test_fully_sharded(alone: Any, sync: bool) -> None:
    """Summed up before or after they are reduced."""
    script = Script()
    fully_shard(script.net)
    script.optimizer = torch.optim.AdamW(script.net.parameters(), 0.1)
    script.state.clear()
    script.state.register({"net": script.net, "optimizer": script.optimizer})
    script.state.snapshot()
    script.net.set_requires_gradient_sync(sync)
    script.backward(1)
    script.state.snapshot()
    script.net.set_requires_gradient_sync(True)
    script.backward(1)
    with refused():
        script.update()


@pytest.fixture
def alone() -> Iterator[None]:
    from torch._C._distributed_c10d import HashStore

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
