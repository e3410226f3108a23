"""Carry out the effects of ``core.node`` on real processes, sockets and the store; answer with facts.

May not know: why an effect was wanted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from signal import Signals

from tmrun import wire
from tmrun.beacon import ENV_BEACON
from tmrun.config import AgentConfig
from tmrun.core import environment, idle, node, streams
from tmrun.core.membership import Job
from tmrun.core.model import Kind, Spec
from tmrun.core.node import Fact, Group
from tmrun.core.story import kind_of
from tmrun.core.txn import Txn
from tmrun.interfaces import interface_of
from tmrun_agent.health import Health
from tmrun_agent.ipc import WorkerServer
from tmrun_agent.logs import Logs
from tmrun_agent.master import MasterStore
from tmrun_agent.processes import Processes, Worker, worker_command
from tmrun_agent.publisher import Publisher
from tmrun_agent.timers import ENV_FILE, FileTimers


@dataclass
class Effects:
    """The agent's hands. ``submit`` runs a transaction and refreshes the snapshot."""

    config: AgentConfig
    processes: Processes
    server: WorkerServer
    publisher: Publisher
    logs: Logs
    master: MasterStore
    health: Health
    file_timers: FileTimers | None
    submit: Callable[[Txn], bool]

    def execute(self, effect: node.Effect, me: node.Node, job: Job) -> list[Fact] | None:
        """Run one effect; None: nothing came of it. Quit is the loop's own."""
        match effect:
            case node.Spawn():
                return [self._spawn(effect, me, job)]
            case node.Kill():
                self.processes.kill(gently=effect.gently, number=effect.signal)
                return [node.Killing(effect.reason)]
            case node.Prepare():
                return self._prepare(effect, me.group, job)
            case node.Commit():
                return self._commit(effect, me.group)
            case node.Abort():
                self._tell(me.group, lambda _: wire.Abort(effect.migration, effect.reason))
                return [node.Sent(effect)]
            case node.Submit():
                return self._submit(effect)
            case node.Note():
                return [effect.fact]
            case node.Quit():
                return None

    def _submit(self, effect: node.Submit) -> list[Fact] | None:
        if not self.submit(effect.txn):
            return None
        if effect.say:
            self.publisher.event(effect.say, kind_of(effect.txn))
        return [effect.then] if effect.then else []

    def _spawn(self, effect: node.Spawn, me: node.Node, job: Job) -> Fact:
        try:
            return node.Spawned(Group(effect.purpose, effect.slot, effect.epoch, effect.generation, self._start(effect, me, job)))
        except (OSError, RuntimeError) as error:
            return node.NotSpawned(effect, f"its workers cannot be started: {error}")

    def _start(self, effect: node.Spawn, me: node.Node, job: Job) -> tuple[int, ...]:
        spec, active = job.spec, effect.purpose is node.Purpose.ACTIVE
        assert spec is not None and job.map is not None
        if effect.slot == 0 and active:
            self.master.open(job.map.master_port, effect.generation)
        ranks = spec.ranks(effect.slot)
        together = {} if active else self._of_standbys(me)
        prefix = self.config.output.prefix
        outputs = self.logs.open(job.restarts, [streams.prefix(prefix, spec.role, i, r, self.config.host) for i, r in enumerate(ranks)])
        with ExitStack() as unused:
            for output in outputs:
                unused.callback(output.started)
            workers = [
                Worker(
                    worker_command(self.config.command, i, no_python=spec.no_python),
                    self._environment(effect, job, spec, i, output.error_file) | together,
                    output,
                    reads=active,  # a rehearsal would take it away from them
                )
                for i, output in enumerate(outputs)
            ]
            unused.pop_all()
        pids = self.processes.spawn(workers)
        self.health.follow(pids)
        return pids

    def _of_standbys(self, me: node.Node) -> dict[str, str]:
        """What those that start together have in common."""
        cautious = {wire.ENV_ROLES: "0"} if me.standby_failures else {}  # perhaps it was another role that it failed in
        return {wire.ENV_NEIGHBOURS: f"{self.config.host}.{secrets.token_hex(4)}", **cautious}

    def _environment(self, effect: node.Spawn, job: Job, spec: Spec, local_rank: int, error_file: str) -> dict[str, str]:
        assert job.map is not None
        env = environment.inherited(spec, local_rank, os.environ)
        env |= environment.worker_environment(
            spec, self.config.job, effect.slot, local_rank, (job.map.master, job.map.master_port), job.restarts
        )
        env["TORCHELASTIC_ERROR_FILE"] = error_file
        env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(Signals(n).name for n in self.config.signals)
        interface = interface_of(self.config.address)
        if interface is not None:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)  # else gloo takes what the hostname resolves to, often 127.0.1.1
        if self.config.cpus:
            env["TMRUN_CPUS"] = self.config.cpus[local_rank]
        if self.file_timers is not None:
            env[ENV_FILE] = str(self.file_timers.path)
        env[ENV_BEACON] = str(self.health.prepare(local_rank))
        env[wire.ENV_SOCKET] = socket_path(self.config)
        env[wire.ENV_LOCAL_RANK] = str(local_rank)
        env[wire.ENV_ROLE] = effect.purpose.value
        env[wire.ENV_EPOCH] = str(effect.epoch)
        env[wire.ENV_GENERATION] = str(effect.generation)
        if effect.slot in idle.rehearsed_first(spec):
            env[wire.ENV_RECORDS] = "1"
        if effect.purpose is node.Purpose.STANDBY:
            env.setdefault(wire.ENV_RECORD_WAIT, f"{spec.prepare_deadline_s:g}")
            env[wire.ENV_REHEARSAL_LOG] = f"{self.config.runtime_dir}/{self.config.host}.{local_rank}.rehearsal.log"
        return env

    def _prepare(self, effect: node.Prepare, group: Group | None, job: Job) -> list[Fact] | None:
        assert group is not None and job.spec is not None
        spec, migration = job.spec, effect.migration
        moved = tuple(rank for m in migration.moves for rank in spec.ranks(m.slot))
        kind = wire.Kind.DRAIN if migration.kind is Kind.DRAIN else wire.Kind.FAILURE
        ranks = spec.ranks(effect.slot)
        base = wire.Prepare(migration.id, kind, migration.base_epoch + 1, moved, -1, migration.generation)
        told = self._tell(group, lambda local: replace(base, rank=ranks[local]))
        return [node.Sent(effect)] if told else None

    def _commit(self, effect: node.Commit, group: Group | None) -> list[Fact]:
        current, how = effect.map, effect.map.resume
        message = wire.Commit(current.migration, current.epoch, how.target, how.sources, dict(effect.comm), how.witness, how.rollback)
        self._tell(group, lambda _: message)
        return [node.Sent(effect)]

    def _tell(self, group: Group | None, message: Callable[[int], wire.Message]) -> bool:
        """Write to every living worker. A worker that is not connected yet is asked again at the next turn."""
        assert group is not None
        living = [(local, pid) for local, pid in enumerate(group.pids) if local not in group.exits]
        if not all(self.server.connected(pid) for _, pid in living):
            return False
        for local, pid in living:
            self.server.send(pid, message(local))
        return True


def socket_path(config: AgentConfig) -> str:
    """The agent's unix socket."""
    return f"{config.runtime_dir}/{config.host}.sock"
