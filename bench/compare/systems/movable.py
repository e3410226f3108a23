"""tmrun: one launcher a host, a store that the first host runs (between namespaces: one of three on each of the first three hosts).

Tuned: ``--lease-ttl 2`` in place of 15, which is what a node that vanishes without a word costs, and ``--hang-timeout 2``. A straggler
is only told of unless a policy is asked for: here ``--straggler drain``.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from bench.compare.lab import Refused
from bench.compare.systems.base import ROOT, System

_CLI_S = 20.0
_JOINED_S = 60.0
_REPORTED_S = 10.0


class Tmrun(System):
    """With one warm standby."""

    venv = "tmrun"
    script = "movable.py"
    standby = 1

    def prepare(self) -> None:
        """See ``System``."""
        super().prepare()
        hosts = [f"node{i}" for i in range(3)] if self.lab.network else ["node0"]
        self.endpoints = ",".join(f"{self.lab.address(h)}:{self.port}" for h in hosts)

    def start_all(self) -> None:
        """node0 first: on one machine any launcher could run the store. With the standby, which a launch waits for."""
        first, *others = self.actives
        self.start(first)
        self.lab.wait("node0 runs the store", lambda: "this host runs the store" in self.lab.nodes[first].output(), _JOINED_S)
        for name in (*others, *([self.spare_name] if self.spare else [])):
            self.start(name)

    def start_spare(self) -> None:
        """It runs already."""

    def argv(self, name: str) -> list[str]:
        """See ``System``."""
        tuning = ["--lease-ttl", "2", "--hang-timeout", "2"] if self.trial.tuned else []
        policy = ["--straggler", "drain"] if self.trial.event == "straggler" else []
        return [
            *(self.python, "-m", "tmrun", "--nnodes", str(self.trial.nodes), "--nproc-per-node", "1", "--standby", str(self.standby)),
            *("--rdzv-endpoint", self.endpoints, "--job", "bench", "--node-name", name, *tuning, *policy),
            *self.work,
        ]

    def env(self, name: str) -> dict[str, str]:
        """See ``System``."""
        secret = {"TMRUN_SECRET": "bench-0123456789abcdef"} if self.lab.network else {}
        return {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'agents'}", **secret}

    def cli(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """(argv, environment) of a verb, run on node0, or on node1 if that is gone."""
        host = "node0" if self.lab.nodes["node0"].launcher.poll() is None else "node1"
        argv = [self.python, "-m", "tmrun", *arguments, "--job", "bench", "--etcd", self.endpoints]
        inside = self.lab.network.inside(host, argv) if self.lab.network else argv
        return inside, self.lab.environment("operator", self.env(host))

    def ask(self, verb: str) -> dict[str, Any]:
        """A verb's JSON; empty when it cannot tell."""
        argv, env = self.cli(verb, "-o", "json")
        try:
            answer = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_CLI_S, check=False)
        except subprocess.TimeoutExpired:
            return {}
        value: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
        return value

    def spare_ready(self) -> bool:
        """Its rehearsal is done."""
        return bool(self.ask("status").get("standby", {}).get("warm", 0) >= self.standby)

    def drain(self, victim: str) -> Callable[[], bool]:
        """``tmrun drain``."""
        argv, env = self.cli("drain", victim)
        log = self.lab.logs / "drain.log"
        verb = self.lab.aside(argv, env, log)

        def over() -> bool:
            if verb.poll() not in (None, 0):
                raise Refused(log.read_text(errors="replace").strip().splitlines()[-1])
            return verb.poll() is not None

        return over

    def phases(self) -> dict[str, Any] | None:
        """The last row of ``tmrun history``, once all nodes have reported to it."""
        deadline = time.monotonic() + _REPORTED_S
        while time.monotonic() < deadline:
            rows = self.ask("history").get("history", [])
            if len(rows) > 1 and rows[-1]["pause_s"] is not None:
                return {k: v for k, v in rows[-1].items() if k.endswith("_s") or k in ("cause", "bytes")}
            time.sleep(0.5)
        return None


class TmrunCold(Tmrun):
    """Without a standby: a lost or leaving node is replaced by a host that is launched at that moment."""

    spare = False
    standby = 0

    def spare_ready(self) -> bool:
        """There is none."""
        return True

    def after_event(self, victim: str, event: str) -> None:
        """Launch the replacement where a node is gone."""
        if event in ("lose", "silent", "dead_link", "store_host"):
            self.start(self.spare_name)

    def drain(self, victim: str) -> Callable[[], bool]:
        """The replacement first: a drain needs a host to drain to, warm or not."""
        self.start(self.spare_name)
        self.lab.wait("the replacement has joined", lambda: len(self.ask("status").get("nodes", ())) > self.trial.nodes, _JOINED_S, 0.5)
        return super().drain(victim)
