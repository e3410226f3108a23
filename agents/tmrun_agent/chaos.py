"""What an operator asks a node to do to itself, to see what happens: a worker or the agent is killed or frozen, the node falls silent.

It is taken in the store before it is done, so that it is done at most once. May not know: what the job makes of it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tmrun.core import transactions
from tmrun.core.membership import Job
from tmrun.core.model import Fault, FaultKind, Seat
from tmrun.core.node import Group
from tmrun.core.txn import Txn
from tmrun.store.api import Store
from tmrun_agent.processes import Processes

_SIGNAL = {FaultKind.KILL: signal.SIGKILL, FaultKind.FREEZE: signal.SIGSTOP}


@dataclass
class Chaos:
    """Used by the agent's one thread."""

    me: Seat
    store: Store
    processes: Processes
    submit: Callable[[Txn], bool]

    def tend(self, job: Job, group: Group | None) -> None:
        """Do what was asked of this life of the node. Raises StoreError."""
        fault = job.faults.get(self.me.host)
        if fault is None or fault.told or fault.incarnation != self.me.incarnation:
            return
        told, strike = self._prepare(fault, group)
        if self.submit(transactions.take_fault(job, fault, told)):
            strike()

    def _prepare(self, fault: Fault, group: Group | None) -> tuple[str, Callable[[], object]]:
        """(what is going to happen, how)."""
        if fault.kind is FaultKind.PARTITION:
            return f"{fault.host} is cut off for {fault.seconds:g} s", lambda: self._cut_off(fault.seconds)
        number = _SIGNAL[fault.kind]
        if fault.agent:
            return f"{number.name} to the agent of {fault.host} (pid {os.getpid()})", lambda: os.kill(os.getpid(), number)
        if group is None or not fault.local_rank < len(group.pids) or fault.local_rank in group.exits:
            return f"nothing: {fault.host} runs no worker {fault.local_rank} now", lambda: None
        pid = group.pids[fault.local_rank]
        return f"{number.name} to worker {fault.local_rank} of {fault.host} (pid {pid})", lambda: os.kill(pid, number)

    def _cut_off(self, seconds: float) -> None:
        """Seen from others a silent host: its agent reaches no store, its workers answer nobody. Its agent has to end them in time."""
        self.processes.signal(signal.SIGSTOP)
        self.store.cut_off(seconds)
        healer = threading.Timer(seconds, self.processes.signal, (signal.SIGCONT,))
        healer.daemon = True
        healer.start()
