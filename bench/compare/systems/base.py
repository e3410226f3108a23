"""What a trial asks of a system."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bench.compare.lab import Lab, kill
from bench.compare.plan import STATES, Trial

TRAIN = Path(__file__).resolve().parents[1] / "train"
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class System(ABC):
    """One system in one trial. ``python``: the interpreter of its virtual environment."""

    trial: Trial
    lab: Lab
    python: str
    cache: Path

    venv: ClassVar[str]
    """The virtual environment it lives in."""
    script: ClassVar[str]
    spare: ClassVar[bool] = True
    """Whether one host more than ``nodes`` is launched and waits."""

    def __post_init__(self) -> None:
        self.actives = [f"node{i}" for i in range(self.trial.nodes)]
        self.prepare()

    def prepare(self) -> None:
        """Choose ports; the lab is open."""
        self.port = self.lab.port()

    @abstractmethod
    def argv(self, name: str) -> list[str]:
        """The launcher's command line on that host."""

    def env(self, name: str) -> dict[str, str]:
        """What the launcher's environment has more."""
        return {}

    def start(self, name: str) -> None:
        """Launch a host."""
        self.lab.start(name, self.argv(name), {**self._compiler(name), **self.env(name)})

    def start_all(self) -> None:
        """Launch the active hosts."""
        for name in self.actives:
            self.start(name)

    @property
    def spare_name(self) -> str:
        """Of the host that waits."""
        return f"node{self.trial.nodes}"

    def start_spare(self) -> None:
        """Launch it; the active hosts are training."""
        if self.spare:
            self.start(self.spare_name)

    def spare_ready(self) -> bool:
        """Whether it is as ready as this system makes it."""
        return True

    def after_event(self, victim: str, event: str) -> None:
        """What an operator or scheduler would do at once: by default nothing."""
        return

    def drain(self, victim: str) -> Callable[[], bool]:
        """Ask that host to leave as planned; returns what tells whether it is free."""
        launcher = self.lab.nodes[victim].launcher
        kill(launcher.pid, signal.SIGTERM)
        return lambda: launcher.poll() is not None

    def phases(self) -> dict[str, Any] | None:
        """How the system itself splits its pause, if it does."""
        return None

    @property
    def work(self) -> list[str]:
        """The training file and its arguments."""
        width, layers, batch = STATES[self.trial.state]
        flags = {"--width": width, "--layers": layers, "--batch": batch}
        return [
            str(TRAIN / self.script),
            *("--out", str(self.lab.folder / "steps"), "--checkpoint", str(self.lab.folder / "checkpoint.pt")),
            *(str(x) for pair in flags.items() for x in pair),
            *(["--compile"] if self.trial.compiled != "off" else []),
        ]

    def _compiler(self, name: str) -> dict[str, str]:
        shared = self.cache / f"inductor-{self.venv}-{self.trial.state}"
        own = self.lab.folder / f"inductor-{name}"
        return {"TORCHINDUCTOR_CACHE_DIR": str(shared if self.trial.compiled == "warm" else own)}
