"""Random states as the worker captures them: always those of the generators, though most of the time nobody asks them."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tmrun.worker import rng, unchanged

PYTHON: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle(list(range(10))),
    "getrandbits": lambda: random.getrandbits(1),
    "seed": lambda: random.seed(3),
    "setstate": lambda: random.setstate(random.Random(5).getstate()),
}
NUMPY: dict[str, Callable[[], Any]] = {
    "rand": np.random.rand,
    "randn": np.random.randn,
    "binomial": lambda: np.random.binomial(10, 0.4),
    "permutation": lambda: np.random.permutation(9),
    "seed": lambda: np.random.seed(4),
    "set_state": lambda: np.random.set_state(np.random.RandomState(9).get_state()),
}


def test_what_nobody_drew_from_is_not_asked_for_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rng.capture()
    monkeypatch.setattr(rng.random, "getstate", SimpleNamespace(__self__=random.getstate.__self__))  # type: ignore[attr-defined]
    monkeypatch.setattr(np.random, "get_state", SimpleNamespace(__self__=np.random.get_state.__self__))
    again = rng.capture()
    assert again["python"] is before["python"]
    assert again["numpy"] is before["numpy"]


@pytest.mark.parametrize("times", [1, 2, 700])
@pytest.mark.parametrize("name", PYTHON)
def test_every_draw_from_python_is_seen(name: str, times: int) -> None:
    rng.capture()
    for _ in range(times):
        PYTHON[name]()
        assert rng.capture()["python"] == random.getstate()


@pytest.mark.parametrize("times", [1, 2, 700])
@pytest.mark.parametrize("name", NUMPY)
def test_every_draw_from_numpy_is_seen(name: str, times: int) -> None:
    rng.capture()
    for _ in range(times):
        NUMPY[name]()
        _same(rng.capture()["numpy"], np.random.get_state())


def test_the_second_half_of_a_pair_of_normals_is_seen() -> None:
    """It moves neither generator: only a stored number is taken."""
    np.random.seed(1)
    np.random.randn()
    random.seed(1)
    random.gauss(0, 1)
    before = rng.capture()
    np.random.randn()
    random.gauss(0, 1)
    after = rng.capture()
    assert (before["numpy"][3], after["numpy"][3]) == (1, 0)
    assert before["python"][2] is not None
    assert after["python"][2] is None


def test_what_is_put_back_is_seen() -> None:
    kept = rng.capture()
    random.random()
    np.random.rand()
    rng.capture()
    rng.restore(kept)
    assert rng.capture()["python"] == kept["python"]
    _same(rng.capture()["numpy"], kept["numpy"])


def test_where_a_draw_does_not_show_the_generators_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "_memory", lambda owner: b"always the same")
    for shows in (unchanged._python_shows, unchanged._numpy_shows):
        shows.cache_clear()
    try:
        assert unchanged.python() is None
        assert unchanged.numpy(np) is None
        rng.capture()
        random.random()
        np.random.rand()
        assert rng.capture()["python"] == random.getstate()
        _same(rng.capture()["numpy"], np.random.get_state())
    finally:
        monkeypatch.undo()
        for shows in (unchanged._python_shows, unchanged._numpy_shows):
            shows.cache_clear()


def test_numpys_generator_of_another_kind_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """``numpy.random.set_bit_generator`` may have put it there; its state may lie anywhere."""
    trial = np.random.RandomState(np.random.PCG64(1))
    monkeypatch.setattr(np.random, "get_state", trial.get_state)
    assert unchanged.numpy(np) is None


def test_the_generators_of_devices_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stand-ins for GPUs; torch gives their states, and wants them, as bytes on the CPU."""
    gpus = [torch.Generator().manual_seed(number) for number in range(2)]

    def put(states: list[torch.Tensor]) -> None:
        for gpu, state in zip(gpus, states, strict=True):
            gpu.set_state(state)

    def draw() -> list[float]:
        return [torch.rand((), generator=gpu).item() for gpu in gpus]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [gpu.get_state() for gpu in gpus])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put)
    draw()
    kept = rng.capture()
    parts = rng.encode(kept)
    wanted = draw()
    rng.restore(kept)
    assert draw() == wanted
    for gpu in gpus:
        gpu.manual_seed(9)
    rng.encode(rng.capture())
    rng.restore(rng.decode(parts))
    assert draw() == wanted


def test_a_process_that_uses_no_device_is_not_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("this would set the device up"))
    assert "cuda" not in rng.capture()


def _same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert (one[1] == other[1]).all()
    assert one[2:] == other[2:]
