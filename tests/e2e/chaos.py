"""Random faults, one after the other, on one running job; reproducible from its seed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from e2e_lab import Lab, frozen, wait_for

FLAGS = ("--local-nodes", "3", "--nnodes", "2", "--nproc-per-node", "2", "--standby", "1", "--lease-ttl", "4", "--hang-timeout", "4")


@dataclass(frozen=True)
class Usage:
    """Of one process."""

    rss_mb: float
    threads: int
    files: int


def usage(pid: int) -> Usage:
    process = psutil.Process(pid)
    return Usage(process.memory_info().rss / 2**20, process.num_threads(), process.num_fds())


@dataclass
class Chaos:
    """Strikes everything but the node that holds slot 0, whose processes have to stay what they are throughout."""

    lab: Lab
    rng: random.Random
    story: list[str] = field(default_factory=list)
    stayer: tuple[int, ...] = ()
    usages: list[list[Usage]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {"TEST_FAULT": str(self.lab.folder / "fault"), "TEST_CUT": str(self.lab.folder / "cut"), "TEST_EXTRA": "1"}

    def strike(self, name: str = "", away_s: float = 0.0) -> None:
        """One fault, a random one or this, and everything well again: the job trains, with a warm standby.

        ``away_s``: for so long the store answers nobody, from just before the fault on.
        """
        before = self.lab.wait_warm()
        seated = {n["slot"]: n for n in before["nodes"] if n["slot"] is not None}
        spare = next(n for n in before["nodes"] if n["slot"] is None and n["state"] == "standby")
        if not self.stayer:
            self.stayer = tuple(seated[0]["pids"])
        name = name or self.rng.choice(sorted(FAULTS))
        with frozen(self.lab.etcds(), away_s):
            moves = FAULTS[name](self, seated[1], spare)
        away = f", store away for {away_s:.0f} s" if away_s else ""
        self.story.append(f"{len(self.story) + 1}: {name} ({seated[1]['name']}, spare {spare['name']}{away})")
        wanted = before["epoch"] + 1 if moves else before["epoch"]

        def well() -> bool:
            now = self.lab.status()
            good = bool(now) and now["state"] == "running" and now["epoch"] >= wanted and now["standby"]["warm"] >= 1
            return good and (now["step"] or 0) >= before["step"] + 2

        wait_for(f"all is well after {self.story[-1]}", well)
        now = next(n for n in self.lab.status()["nodes"] if n["slot"] == 0)
        assert tuple(now["pids"]) == self.stayer, f"the stayer was restarted by {self.story[-1]}"
        self.usages.append([usage(p) for p in self.stayer])

    def agent(self, node: dict[str, Any]) -> int:
        return self.lab.agents()[node["name"]]

    def pid(self, node: dict[str, Any]) -> int:
        return int(self.rng.choice(node["pids"]))

    def plant(self, rank: int, kind: str) -> None:
        """What ``paced_gpt`` does in that rank's next forward pass."""
        plan = self.lab.folder / "fault"
        plan.with_suffix(".new").write_text(f"{rank} {kind}")
        plan.with_suffix(".new").rename(plan)


Fault = Callable[[Chaos, dict[str, Any], dict[str, Any]], bool]


def _signalled(number: int) -> Fault:
    def strike(chaos: Chaos, active: dict[str, Any], spare: dict[str, Any]) -> bool:
        os.kill(chaos.pid(active), number)
        return True

    return strike


def _planted(kind: str) -> Fault:
    def strike(chaos: Chaos, active: dict[str, Any], spare: dict[str, Any]) -> bool:
        chaos.plant(chaos.rng.choice(active["ranks"]), kind)
        return True

    return strike


def _agent(number: int, *, of_spare: bool) -> Fault:
    def strike(chaos: Chaos, active: dict[str, Any], spare: dict[str, Any]) -> bool:
        os.kill(chaos.agent(spare if of_spare else active), number)
        return not of_spare

    return strike


def _drain(chaos: Chaos, active: dict[str, Any], spare: dict[str, Any]) -> bool:
    drained = chaos.lab.cli("drain", active["name"], "--reason", "chaos")
    assert drained.returncode == 0, drained.stderr
    assert chaos.lab.cli("undrain", active["name"]).returncode == 0
    return True


def _both(chaos: Chaos, active: dict[str, Any], spare: dict[str, Any]) -> bool:
    """A node and the only standby at once: more leave than can join."""
    pid = chaos.agent(spare)
    os.kill(chaos.pid(active), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    return True


def _joiner(chaos: Chaos, active: dict[str, Any], spare: dict[str, Any]) -> bool:
    """The joiner's processes die while they take over."""
    marked = [p.pid for p in psutil.Process(chaos.agent(spare)).children() if "bootstrap" in " ".join(p.cmdline())]
    os.kill(chaos.pid(active), signal.SIGKILL)
    for pid in marked[:1]:
        os.kill(pid, signal.SIGKILL)
    return True


def _store(chaos: Chaos, active: dict[str, Any], spare: dict[str, Any]) -> bool:
    """The store dies, and a worker a moment later."""
    old = chaos.lab.etcds()
    os.kill(old[0], signal.SIGKILL)
    os.kill(chaos.pid(active), signal.SIGKILL)
    wait_for("a new etcd", lambda: [p for p in chaos.lab.etcds() if p not in old])
    return True


def _cut(chaos: Chaos, active: dict[str, Any], spare: dict[str, Any]) -> bool:
    (Path(chaos.lab.folder) / "cut").write_text(str(chaos.rng.choice(active["ranks"])))
    return True


FAULTS: dict[str, Fault] = {
    "worker SIGKILL": _signalled(signal.SIGKILL),
    "worker SIGSEGV": _signalled(signal.SIGSEGV),
    "worker SIGSTOP": _signalled(signal.SIGSTOP),
    "worker loops for ever": _planted("loop"),
    "worker holds its GIL": _planted("gil"),
    "worker skips a collective": _planted("skip"),
    "agent SIGKILL": _agent(signal.SIGKILL, of_spare=False),
    "agent SIGSTOP": _agent(signal.SIGSTOP, of_spare=False),
    "standby agent SIGKILL": _agent(signal.SIGKILL, of_spare=True),
    "drain": _drain,
    "node and standby at once": _both,
    "joiner dies": _joiner,
    "store and worker at once": _store,
    "connections cut": _cut,
}
