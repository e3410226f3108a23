"""Watches the agents that this launcher started: one that ends is noticed at once, one that is frozen is ended with all its workers.

A frozen agent cannot end its workers before others may take their ranks; this launcher can, and then knows that they are gone. What it does
about an end is the launcher's own. May not know: jobs, stores.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tmrun import procs
from tmrun.beacon import Beacon

LOOK_S = 0.1
BLIND_S = 1.0
"""Whoever did not look for longer cannot tell how long an agent was still."""


@dataclass
class _Ward:
    agent: subprocess.Popen[bytes]
    beacon: Beacon
    ticks: int
    moved: float


@dataclass
class Wards:
    """``frozen_s``: an agent that shows no sign of life for so long is frozen. ``marker`` finds the processes of a host's node
    (``variable``=``marker``/HOST), ``ended`` and ``tell`` are called from other threads."""

    frozen_s: float
    marker: str
    variable: str
    ended: Callable[[], None]
    tell: Callable[[str], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wards: dict[str, _Ward] = field(default_factory=dict)

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="wards", daemon=True).start()

    def watch(
        self, host: str, argv: Sequence[str], env: Mapping[str, str], beacon: Path, held: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start an agent, which beats in ``beacon`` once it runs and inherits our standard input
        and the descriptors ``held``, and watch it."""
        page = Beacon.create(beacon)
        agent = subprocess.Popen(argv, env=env, start_new_session=True, pass_fds=held)
        with self._lock:
            self._wards[host] = _Ward(agent, page, 0, time.monotonic())
        threading.Thread(target=self._wait, args=(agent,), name="ward-wait", daemon=True).start()
        return agent

    def beats(self, host: str) -> bool:
        """Whether its agent has shown that it runs: before that a signal would end it."""
        with self._lock:
            ward = self._wards.get(host)
        return ward is not None and ward.agent.poll() is None and ward.beacon.get("ticks") > 0

    def _wait(self, agent: subprocess.Popen[bytes]) -> None:
        agent.wait()
        self.ended()

    def _run(self) -> None:
        looked = time.monotonic()
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            with self._lock:
                wards = list(self._wards.items())
            for host, ward in wards:
                self._look(host, ward, now, blind=now - looked > BLIND_S)
            looked = now

    def _look(self, host: str, ward: _Ward, now: float, *, blind: bool) -> None:
        ticks = ward.beacon.get("ticks")
        if blind or ticks != ward.ticks or not ticks:  # before its first beat it may still be importing
            ward.ticks, ward.moved = ticks, now
        elif now - ward.moved > self.frozen_s and ward.agent.poll() is None:
            self.tell(f"agent {host} is frozen: no sign of life for {now - ward.moved:.1f} s; ending it and its workers")
            ward.moved = now
            procs.sweep(f"{self.marker}/{host}", self.variable)
