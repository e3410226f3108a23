"""Exchanging the backend under a process group, again and again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from tmrun.core.errors import WorkerError
from tmrun.worker.groups import SlotSwitch

CPU = torch.device("cpu")


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_more_than_a_hundred_switches_with_a_poison_in_between(world: dist.ProcessGroup) -> None:
    switch, name = SlotSwitch(world, fake=False), world.group_name
    for _ in range(120):
        switch.poison()
        poison = world._get_backend(CPU)
        backend = FakeProcessGroup._create_internal(0, 1)
        switch.install(backend)
        assert world._get_backend(CPU) is backend
        assert world.group_name == name
    switch.poison()
    assert world._get_backend(CPU) is poison
    real = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    switch.install(real)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [1.0, 1.0, 1.0]


def test_when_the_room_is_used_up_it_says_so(world: dist.ProcessGroup) -> None:
    switch = SlotSwitch(world, fake=False)
    while switch.room:
        switch.install(FakeProcessGroup._create_internal(0, 1))
    with pytest.raises(WorkerError, match="was switched 240 times; restart the job"):
        switch.install(FakeProcessGroup._create_internal(0, 1))
