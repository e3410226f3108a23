"""What a process shows of itself: that torch.compile is at work, forward and backward, and after torch has forgotten who listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tmrun.beacon import Beacon
from tmrun.worker.pulse import Pulse


@pytest.mark.parametrize("forgotten", [False, True], ids=["", "after a reset"])
def test_a_compiler_at_work_is_seen(forgotten: bool) -> None:
    beacon, seen = Beacon.attach(None), []
    pulse = Pulse(beacon)
    pulse.hear_compiler()
    if forgotten:
        torch._dynamo.reset()
        pulse.hear_compiler()

    def compiler(graph: Any, _: Any) -> Callable[..., Any]:
        seen.append(beacon.get("compiling"))
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    double = torch.compile(lambda x: (2 * x).sin(), backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    value = torch.ones(3, requires_grad=True)
    try:
        found = double(value).sum()
        assert (seen, beacon.get("compiling")) == ([1], 0)
        found.backward()
        assert (seen, beacon.get("compiling")) == ([1, 1], 0)
        pulse.hear_compiler()
        assert [pulse._compiles, pulse._compiled] == [
            *torch._dynamo.callback.callback_handler.start_callbacks,
            *torch._dynamo.callback.callback_handler.end_callbacks,
        ], "each once"
    finally:
        torch._dynamo.reset()
    assert beacon.reading(stopped=False).compiling is False
