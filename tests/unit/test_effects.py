"""What an agent's hands leave behind when something cannot be done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from test_core import running, seat
from test_failures import opened
from tmrun_agent.effects import Effects
from tmrun_agent.health import Health
from tmrun_agent.ipc import WorkerServer
from tmrun_agent.logs import Logs
from tmrun_agent.master import MasterStore
from tmrun_agent.processes import Processes
from tmrun_agent.publisher import Publisher

from tmrun import wire
from tmrun.config import AgentConfig, StoreAccess
from tmrun.core import node
from tmrun.core.node import Purpose
from tmrun.core.streams import Output


class Full:
    """A machine on which no beacon can be made."""

    def prepare(self, local_rank: int) -> Path:
        raise OSError(28, "No space left on device")


def test_workers_that_cannot_be_started_leave_no_output_open(tmp_path: Path) -> None:
    config = AgentConfig("job", "b", StoreAccess("http://nowhere:1"), "127.0.0.1", str(tmp_path), "marker", 1, ("train.py",))
    logs = Logs(Output(only=(7,)), "job", "b", tmp_path / "scratch", lambda _: None, lambda _: None)
    effects = Effects(
        config, cast(Processes, None), cast(WorkerServer, None), cast(Publisher, None), logs, cast(MasterStore, None), cast(Health, Full()),
        None, lambda _: True,
    )  # fmt: skip
    before, spawn = opened(), node.Spawn(Purpose.ACTIVE, 1, 1, 1, "")
    facts = effects.execute(spawn, node.Node(seat("b"), 1), running())
    assert facts == [node.NotSpawned(spawn, "its workers cannot be started: [Errno 28] No space left on device")]
    logs.close()
    assert opened() <= before


def test_a_standby_that_failed_rehearses_its_own_rank_only(tmp_path: Path) -> None:
    """It may be another role that it failed in."""
    config = AgentConfig("job", "b", StoreAccess("http://nowhere:1"), "127.0.0.1", str(tmp_path), "marker", 1, ("train.py",))
    effects = Effects(
        config, cast(Processes, None), cast(WorkerServer, None), cast(Publisher, None), cast(Logs, None), cast(MasterStore, None),
        cast(Health, None), None, lambda _: True,
    )  # fmt: skip
    fine, failed = (effects._of_standbys(replace(node.Node(seat("b"), 1), standby_failures=n)) for n in (0, 1))
    assert wire.ENV_ROLES not in fine and failed[wire.ENV_ROLES] == "0"
    assert fine[wire.ENV_NEIGHBOURS] != failed[wire.ENV_NEIGHBOURS], "each start is one of its own"
