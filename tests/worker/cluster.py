"""Real worker processes under a fake agent and a scripted coordinator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from zlib import crc32

from fake_agent import Channel, FakeAgent
from nursery import Child, Nursery

from tmrun import wire
from tmrun.core import planner
from tmrun.core.model import Resume, WorkerVote
from tmrun.worker import shim
from tmrun.worker.groups import ENV_SWITCH

M = TypeVar("M")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("paced_gpt.py")
DEADLINE_S = 180.0
STEPS = 24
"""Of the fixtures in ``conftest``."""


@dataclass(eq=False)
class Worker:
    process: subprocess.Popen[bytes] | Child
    rank: int
    agent: FakeAgent
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def channel(self) -> Channel:
        self.agent.wait(lambda: self.pid in self.agent.channels, DEADLINE_S, f"rank {self.rank} connects")
        return self.agent.channels[self.pid]


def switch_of_this_test() -> str:
    """Half of the tests run with each; which, their names decide. TMRUN_SWITCH=shim pytest tests/worker: all with the C++ switch."""
    if chosen := os.environ.get(ENV_SWITCH):
        return chosen
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return "shim" if crc32(name.encode()) % 2 and shim.load() is not None else "slot"


class Cluster:
    nursery: Nursery | None = None

    def __init__(self, directory: Path, world: int, arguments: list[str], environment: dict[str, str], script: Path = SCRIPT) -> None:
        self.directory, self.world, self.arguments = directory, world, arguments
        self.environment, self.script = environment, script
        self.switch = switch_of_this_test()
        self.losses = directory / "losses"
        self.losses.mkdir()
        self.agent = FakeAgent(directory / "s")
        self.ranks: dict[int, Worker] = {}
        self.standbys: list[Worker] = []
        self.processes: list[subprocess.Popen[bytes] | Child] = []
        self.epoch = 1
        self.migration = 0
        self.edit_map: Callable[[dict[str, str]], object] | None = None

    # -- processes ------------------------------------------------------------------------------------------------------------------
    def start(self, *, at_once: bool = False) -> None:
        """Start all ranks, ``at_once`` or when the standbys are warm."""
        for worker in [] if at_once else self.standbys:
            self.expect(worker, wire.Warm)
        for rank in range(self.world):
            self.ranks[rank] = self._spawn(rank, "active")

    def standby(self, rank: int, **environment: str) -> Worker:
        self.standbys.append(self._spawn(rank, "standby", environment))
        return self.standbys[-1]

    def _spawn(self, rank: int, role: str, more: Mapping[str, str] = MappingProxyType({})) -> Worker:
        log = self.directory / f"{role}-{rank}-{len(self.processes)}.log"
        local_world = int(self.environment.get("LOCAL_WORLD_SIZE", self.world))
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("TMRUN_")},
            ENV_SWITCH: self.switch,
            **self.environment, **more,
            "RANK": str(rank), "LOCAL_RANK": str(rank % local_world), "WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(local_world),
            "GROUP_RANK": str(rank // local_world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            wire.ENV_SOCKET: self.agent.path, wire.ENV_ROLE: role, wire.ENV_EPOCH: "1" if role == "active" else "0",
            wire.ENV_GENERATION: "1", wire.ENV_REHEARSAL_LOG: str(self.directory / f"rehearsal-{len(self.processes)}.log"),
            wire.ENV_PARENT: str(self.nursery.pid if self.nursery else os.getpid()),
        }  # fmt: skip
        process = self._run([str(self.script), *self.arguments, "--log-losses", str(self.losses)], environment, log)
        self.processes.append(process)
        return Worker(process, rank, self.agent, log)

    def _run(self, arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes] | Child:
        if self.nursery is not None:
            return self.nursery.run(ROOT / "tmrun/worker/bootstrap.py", arguments, environment, log, self.directory)
        command = [sys.executable, "-m", "tmrun.worker.bootstrap", *arguments]
        with open(log, "wb") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=self.directory)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.agent.close()

    # -- waiting --------------------------------------------------------------------------------------------------------------------
    def expect(self, worker: Worker, kind: type[M], **fields: object) -> M:
        """The first message of this kind with these fields, past or future."""

        def found() -> list[M]:
            return [m for m in worker.channel.messages if isinstance(m, kind) and all(getattr(m, k) == v for k, v in fields.items())]

        try:
            self.agent.wait(lambda: bool(found()), DEADLINE_S, f"{kind.__name__} {fields} from rank {worker.rank}")
        except AssertionError:
            raise AssertionError(f"no {kind.__name__} {fields}: {worker.channel.messages}\n{self.output()}") from None
        return found()[0]

    def reach(self, step: int) -> None:
        def reached() -> bool:
            heard = [m for c in self.agent.channels.values() for m in c.messages]
            return any(isinstance(m, wire.Progress) and m.step >= step for m in heard)

        self.agent.wait(reached, DEADLINE_S, f"step {step}")

    def died(self, rank: int) -> None:
        """Wait until the process of a rank was killed."""
        assert self.ranks[rank].process.wait(DEADLINE_S) == -signal.SIGKILL, self.output()

    def finish(self) -> str:
        """Wait for everybody's good end; the final digest."""
        for worker in self.ranks.values():
            assert worker.process.wait(DEADLINE_S) == 0, self.output()
            self.expect(worker, wire.Finished)
        lines = [line for line in self.output().splitlines() if line.startswith("final parameters sha256 ")]
        assert len(set(lines)) == 1, self.output()
        return lines[0].split()[-1]

    def output(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(self.directory.glob("*.log")))

    def rehearsal(self) -> str:
        return "\n".join(p.read_text() for p in sorted(self.directory.glob("rehearsal-*.log")))

    # -- coordinating ---------------------------------------------------------------------------------------------------------------
    def prepare(self, kind: wire.Kind, joiners: dict[int, Worker]) -> int:
        for joiner in joiners.values():
            self.expect(joiner, wire.Warm)
        self.migration += 1
        moved = tuple(sorted(joiners))
        stayers = [w for r, w in self.ranks.items() if kind is wire.Kind.DRAIN or r not in joiners]
        for worker, rank in [*((w, w.rank) for w in stayers), *((w, r) for r, w in joiners.items())]:
            worker.channel.send(wire.Prepare(self.migration, kind, self.epoch + 1, moved, rank, 1))
        return self.migration

    def abort(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.channel.send(wire.Abort(self.migration, "test"))

    def drain(self, rank: int, joiner: Worker) -> int:
        """Move a rank; the step at which it moved."""
        leaver = self.ranks[rank]
        stop, commit = self.prepare_drain(rank, joiner)
        commit()
        self.expect(leaver, wire.Left)
        assert leaver.process.wait(DEADLINE_S) == 0, self.output()
        self._seat({rank: joiner})
        return stop

    def prepare_drain(self, rank: int, joiner: Worker) -> tuple[int, Callable[[], None]]:
        """Until everybody is ready to move a rank; the step before which all stop, and what commits it."""
        number = self.prepare(wire.Kind.DRAIN, {rank: joiner})
        everybody = [*self.ranks.values(), joiner]
        votes = [self.expect(worker, wire.Prepared, migration=number) for worker in everybody][:-1]
        stops = {v.stop_step for v in votes}
        assert len(stops) == 1, votes
        (stop,) = stops
        assert stop is not None
        return stop, partial(self._commit, number, Resume(stop), votes, everybody)

    def heal(self, joiners: dict[int, Worker]) -> int:
        """Replace dead ranks; the step at which training went on."""
        return self.conclude(self.prepare(wire.Kind.FAILURE, joiners), joiners)

    def conclude(self, number: int, joiners: dict[int, Worker], *, seat: bool = True) -> int:
        """Commit a failure migration that was prepared. ``seat``: wait until everybody switched."""
        stayers = {r: w for r, w in self.ranks.items() if r not in joiners}
        votes = {r: self.expect(w, wire.Prepared, migration=number) for r, w in stayers.items()}
        for joiner in joiners.values():
            self.expect(joiner, wire.Prepared, migration=number)
        parked = [WorkerVote(r, v.step or 0, v.next_step or 0, v.covers, v.snapshots, v.witnessed) for r, v in votes.items()]
        resume = planner.resume(sorted(joiners), parked)
        assert resume is not None, (parked, self.output())
        self._commit(number, resume, list(votes.values()), [*stayers.values(), *joiners.values()])
        if seat:
            self._seat(joiners)
        return resume.target

    def _seat(self, joiners: dict[int, Worker]) -> None:
        for rank, joiner in joiners.items():
            joiner.rank = rank
            self.ranks[rank] = joiner
        for worker in self.ranks.values():
            self.expect(worker, wire.Switched, epoch=self.epoch)

    def _commit(self, number: int, how: Resume, votes: list[wire.Prepared], to: list[Worker]) -> None:
        self.epoch += 1
        comm = {name: f"m{number}/{name}" for vote in votes for name in vote.groups}
        if self.edit_map is not None:
            self.edit_map(comm)
        for worker in to:
            worker.channel.send(wire.Commit(number, self.epoch, how.target, how.sources, comm, how.witness, how.rollback))
