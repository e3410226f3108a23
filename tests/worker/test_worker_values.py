from __future__ import annotations

import collections
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tmrun.core.errors import WorkerError
from tmrun.worker import values

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_trees_come_back(tree: Any) -> None:
    back = values.decode(values.encode(tree))
    assert back == tree
    assert type(back) is type(tree)


@pytest.mark.parametrize(
    "value",
    [
        1 << 200, -(1 << 63), 2 + 3j, {1, "a"}, frozenset([2]), torch.float32, torch.device("cpu"), "\ud800",
        collections.Counter({3: 2}), collections.OrderedDict(b=1, a=2), collections.deque([1, 2]), True, 1.5, math.inf,
    ],
    ids=repr,
)  # fmt: skip
def test_single_values_keep_their_type(value: Any) -> None:
    back = values.decode(values.encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 5).to(dtype)
    back = values.decode(values.encode(tensor))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_transposed_tensor_keeps_its_logical_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(values.decode(values.encode(tensor)), tensor)


def test_numpy() -> None:
    tree = [numpy.arange(6, dtype=numpy.int16).reshape(2, 3), numpy.float32(1.25), numpy.int64(7)]
    array, *scalars = values.decode(values.encode(tree))
    assert (array == tree[0]).all()
    assert array.dtype == numpy.int16
    assert [type(s) for s in scalars] == [numpy.float32, numpy.int64]
    assert scalars == tree[1:]


def test_what_cannot_travel_is_named_with_its_place() -> None:
    with pytest.raises(WorkerError, match=r"schedule\['fns'\]\[1\] is a builtins\.function"):
        values.encode({"fns": [1, lambda: 0]}, "schedule")
    with pytest.raises(WorkerError, match="ndarray"):
        values.encode(numpy.array([object()]))


def test_damage_is_an_error() -> None:
    body = values.encode(["text", 3])
    with pytest.raises(WorkerError):
        values.decode(body + b"N")
    with pytest.raises(WorkerError):
        values.decode(b"?" + body)
    with pytest.raises(WorkerError):
        values.decode(values.encode("text")[:-1])
