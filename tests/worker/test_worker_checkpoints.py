"""A rehearsal writes no checkpoint, by whichever name torch is asked for one, and reads alone."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from tmrun.worker import checkpoints

WAYS = {
    "save": lambda state, to: checkpoint.save(state, checkpoint_id=to),
    "save of its module": lambda state, to: state_dict_saver.save(state, checkpoint_id=to),
    "async_save": lambda state, to: state_dict_saver.async_save(state, checkpoint_id=to).result(),
    "save_state_dict": lambda state, to: checkpoint.save_state_dict(state, checkpoint.FileSystemWriter(to)),
    "_save_state_dict": lambda state, to: state_dict_saver._save_state_dict(state, checkpoint.FileSystemWriter(to)),
    "torch.save": lambda state, to: torch.save(state, to),
}


@pytest.fixture
def rehearsing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether this process, alone in its group, rehearses."""
    modules: list[Any] = [torch, checkpoint, state_dict_saver, state_dict_loader]
    for module in modules:
        for name in (*checkpoints._WRITE, *checkpoints._READ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    answer = [True]
    checkpoints.guard(lambda: answer[0])
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield answer
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*save_state_dict.*")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_written(rehearsing: list[bool], tmp_path: Path, way: str) -> None:
    state = {"x": torch.arange(3.0)}
    WAYS[way](state, tmp_path / "it")
    assert not (tmp_path / "it").exists()
    rehearsing[0] = False
    WAYS[way](state, tmp_path / "it")
    assert (tmp_path / "it").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled")
def test_reading_asks_nobody(rehearsing: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsing[0] = False
    checkpoint.save({"x": torch.arange(3.0)}, checkpoint_id=tmp_path / "it")
    rehearsing[0] = True
    for collective in ("broadcast_object_list", "gather_object", "scatter_object_list", "all_gather_object"):
        monkeypatch.setattr(dist, collective, None)
    for load in (
        lambda state: checkpoint.load(state, checkpoint_id=tmp_path / "it"),
        lambda state: checkpoint.load_state_dict(state, checkpoint.FileSystemReader(tmp_path / "it"), None, 0, False),
    ):
        found = {"x": torch.zeros(3)}
        load(found)
        assert found["x"].tolist() == [0, 1, 2]


def test_every_name_is_one_of_torchs() -> None:
    for part, names in (("state_dict_saver", checkpoints._WRITE), ("state_dict_loader", checkpoints._READ)):
        module = importlib.import_module(f"torch.distributed.checkpoint.{part}")
        assert all(hasattr(module, name) for name in names)
    assert [*inspect.signature(state_dict_loader.load_state_dict).parameters].index("no_dist") == checkpoints._NO_DIST
