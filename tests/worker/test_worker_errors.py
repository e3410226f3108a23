"""Which errors of a step mean that a rank was lost, so that the step is run again, and which end the script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tmrun.core.errors import WorkerError
from tmrun.worker.process import Process, SoftRestart, StepLost, VoteBroken

BROKEN = CheckpointException("read", {0: (dist.DistBackendError("Connection closed"), [])})  # type: ignore[dict-item]
LOST = dist.DistBackendError("[pair.cc:553] Connection closed by peer [127.0.0.1]:2487")
ALWAYS = (LOST, StepLost(), VoteBroken("lost"))
NEVER = (WorkerError("wrong use"), KeyboardInterrupt(), SystemExit(1), GeneratorExit(), SoftRestart(1))


def means_loss(error: BaseException, *, trouble: bool = False, failure: bool = False, failing: bool = False) -> bool:
    process = SimpleNamespace(
        trouble=object() if trouble else None,
        board=SimpleNamespace(failure=object() if failure else None),
        live=SimpleNamespace(failing=failing),
    )
    return Process.is_communication(cast(Any, process), error)


@pytest.mark.parametrize("known", ["", "trouble", "failure", "failing"])
def test_what_an_error_means(known: str) -> None:
    told = {known: True} if known else {}
    assert all(means_loss(error, **told) for error in ALWAYS)
    assert not any(means_loss(error, **told) for error in NEVER)
    assert means_loss(ValueError("on garbage"), **told) == (known in ("failure", "failing"))
    assert means_loss(BROKEN, **told) == bool(known)
