"""Who this process is: read once from the environment that the agent gave it; only a standby's rank changes later."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tmrun import wire
from tmrun.core.errors import WorkerError


@dataclass
class Identity:
    """One worker's place in the job."""

    socket: str
    standby: bool
    rank: int
    local_rank: int
    world: int
    local_world: int
    epoch: int
    generation: int
    rehearsal_log: str

    def become(self, rank: int) -> None:
        """Rehearse as another rank; the local rank belongs to the machine and stays."""
        self.rank = rank
        os.environ["RANK"] = os.environ["ROLE_RANK"] = str(rank)
        os.environ["GROUP_RANK"] = str(rank // self.local_world)


def from_environment() -> Identity:
    """Raises WorkerError naming a variable that is missing or not a number."""
    return Identity(
        socket=_text(wire.ENV_SOCKET),
        standby=_text(wire.ENV_ROLE) == "standby",
        rank=_number("RANK"),
        local_rank=_number(wire.ENV_LOCAL_RANK if wire.ENV_LOCAL_RANK in os.environ else "LOCAL_RANK"),
        world=_number("WORLD_SIZE"),
        local_world=_number("LOCAL_WORLD_SIZE"),
        epoch=_number(wire.ENV_EPOCH),
        generation=_number(wire.ENV_GENERATION),
        rehearsal_log=os.environ.get(wire.ENV_REHEARSAL_LOG, os.devnull),
    )


def _text(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise WorkerError(f"{name} is not set; this module is started by a tmrun agent, not by hand")
    return value


def _number(name: str) -> int:
    value = _text(name)
    try:
        return int(value)
    except ValueError:
        raise WorkerError(f"{name}={value!r} is not a number") from None
