"""What still speaks of the old rank after a standby took another one in place; the taking itself is in ``test_worker_drain``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, SequentialSampler, Subset
from torch.utils.data.distributed import DistributedSampler

import tmrun
from tmrun.worker import roles, suspects
from tmrun.worker.state import State


class Shard(Dataset[int]):
    def __init__(self, rank: int) -> None:
        self.data_rank = rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def sampler(rank: int) -> Any:
    return DistributedSampler(range(16), num_replicas=2, rank=rank, shuffle=False)  # type: ignore[arg-type]


LOADERS = {
    "loader.sampler.rank": lambda rank: DataLoader(range(16), sampler=sampler(rank)),
    "loader.batch_sampler.sampler.rank": lambda rank: DataLoader(range(16), batch_sampler=BatchSampler(sampler(rank), 2, False)),
    "loader.dataset.data_rank": lambda rank: DataLoader(Shard(rank)),
    "loader.dataset.dataset.datasets[1].data_rank": lambda rank: DataLoader(
        Subset(ConcatDataset([Shard(7), Shard(rank)]), range(16)), sampler=SequentialSampler(range(16))
    ),
}


@pytest.mark.parametrize("place", LOADERS)
def test_a_rank_deep_in_a_loader_is_found(place: str) -> None:
    for rank, found in ((1, [f"data.{place}"]), (0, [])):
        state = State()
        state.register({"data": tmrun.Batches(LOADERS[place](rank))})  # type: ignore[operator]
        process: Any = SimpleNamespace(state=state)
        assert [name for name in roles.stale(process, 1, None) if name.startswith("data.loader")][: len(found) or None] == found


def test_a_group_that_somebody_holds() -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.group = world

    world: Any = dist.ProcessGroup(0, 1)
    state = State()
    state.register({"net": torch.nn.Sequential(torch.nn.Linear(1, 1), Norm())})
    trainer = SimpleNamespace(rank=0, group=world)
    process: Any = SimpleNamespace(state=state)
    assert trainer.rank == 0
    found = set(roles._held(process, world, sys._getframe()))
    assert found == {"world", "trainer.group", "net.1.group"}


class Samples(Mapping[int, Any]):
    """Each of many is read from a file."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 1 << 16

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, key: int) -> Any:
        self.read += 1
        return key


def test_not_all_samples_are_looked_at() -> None:
    """Neither for what holds a group, while a rank waits to be taken, nor for what was not registered, when the loop begins."""
    world: Any = dist.ProcessGroup(0, 1)
    samples, in_memory, state = Samples(), [world] + [0] * 100 + [world], State()
    assert set(roles._held(cast(Any, SimpleNamespace(state=state)), world, sys._getframe())) == {"world", "in_memory[0]"}
    assert len(in_memory) > suspects.FEW
    assert suspects.find(state, [{"samples": samples}]) == []
    assert samples.read <= 2 * suspects.FEW


def test_what_was_drawn_for_another_rank_is_not_given_again() -> None:
    """Both ranks' positions look alike: the same epoch, the same random state at its beginning."""

    def batches(rank: int) -> tmrun.Batches[Any]:
        torch.manual_seed(0)
        return tmrun.Batches(DataLoader(range(16), sampler=sampler(rank)))

    other, mine = batches(0), batches(1)
    for _ in range(3):
        next(other)
    for _ in range(2):
        next(mine)
    position, wanted = mine.state_dict(), [int(next(mine)) for _ in range(3)]
    other.loader.sampler.rank = 1  # type: ignore[attr-defined]
    other.forget()
    other.load_state_dict(position)
    assert [int(next(other)) for _ in range(3)] == wanted
