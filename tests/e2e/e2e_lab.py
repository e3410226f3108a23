"""Real launches: the `tmrun` command with its etcd, agents and workers as processes of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tmrun import procs
from tmrun.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GPT = ROOT / "tests" / "worker" / "paced_gpt.py"
STEPS = 150
WORLD = 4
DEADLINE_S = 180.0
_ASKING = threading.Lock()
"""Where this process writes to, and where its temporary files are, is changed for one question at a time."""


def wait_for(what: str, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Poll until the condition is truthy; its value."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.25)
    raise AssertionError(f"not within {deadline_s:.0f} s: {what}")


@contextmanager
def frozen(pids: Iterable[int], seconds: float) -> Iterator[None]:
    """These processes stand still from here on, for so long after the block; 0: not at all."""
    if not seconds:
        yield
        return
    still = list(pids)
    for pid in still:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(seconds)
    finally:
        for pid in still:
            os.kill(pid, signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Lab:
    """Launches with a temp folder of their own; everything is gone afterwards, or the test fails."""

    folder: Path
    launches: list[subprocess.Popen[str]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    @property
    def losses(self) -> Path:
        return self.folder / "losses"

    @property
    def marker(self) -> str:
        return str(self.folder)

    def environment(self, **more: str) -> dict[str, str]:
        mine = {"TMPDIR": str(self.folder / "tmp"), "TEST_LAB": self.marker, "TEST_FAST": str(self.folder / "fast"), "TEST_PACE_S": "0.6"}
        inherited = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"}  # set by importing the store, as other tests do
        return {**inherited, **mine, **more}

    def launch(
        self, *arguments: str, steps: int = STEPS, script: Path = GPT, script_args: tuple[str, ...] | None = None, **env: str
    ) -> int:
        """Start ``tmrun`` in the background; the index of the launch."""
        if script_args is None:
            script_args = ("--steps", str(steps), "--log-losses", str(self.losses))
        log = self.folder / f"launch{len(self.launches)}.log"
        self.logs.append(log)
        with log.open("w") as out:
            argv = [sys.executable, "-m", "tmrun", *arguments, str(script), *script_args]
            launch = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, text=True, env=self.environment(**env), cwd=self.folder)
        self.launches.append(launch)
        return len(self.launches) - 1

    def cli(self, *arguments: str, said: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """``said`` on its standard input."""
        argv = [sys.executable, "-m", "tmrun", *arguments]
        more = self.environment(**env)
        return subprocess.run(argv, env=more, input=said, text=True, capture_output=True, timeout=DEADLINE_S, check=False)

    def ask(self, *arguments: str) -> dict[str, Any]:
        """What a command says as JSON, run in this process: one of its own takes a core for half a second. {} if there is no answer."""
        said = io.StringIO()
        with _ASKING, redirect_stdout(said), redirect_stderr(io.StringIO()):
            before, tempfile.tempdir = tempfile.tempdir, str(self.folder / "tmp")
            try:
                code = main.run([*arguments, "-o", "json"])
            finally:
                tempfile.tempdir = before
        value: dict[str, Any] = json.loads(said.getvalue()) if code == 0 else {}
        return value

    def status(self, *arguments: str) -> dict[str, Any]:
        """{} while there is nothing to ask."""
        return self.ask("status", *arguments)

    def history(self) -> list[dict[str, Any]]:
        answer = self.ask("history")
        assert answer, f"the job does not answer\n{self.output()}"
        rows: list[dict[str, Any]] = answer["history"]
        return rows

    def node(self, name: str) -> dict[str, Any]:
        return next((n for n in self.status().get("nodes", ()) if n["name"] == name), {"state": "unknown", "pids": []})

    def wait_warm(self, count: int = 1, *arguments: str) -> dict[str, Any]:
        """Until so many standbys are warm and the active workers train; the status."""

        def ready() -> dict[str, Any] | None:
            value = self.status(*arguments)
            warm = bool(value) and value["standby"]["warm"] >= count and (value["step"] or 0) >= 3
            return value if warm else None

        value: dict[str, Any] = wait_for(f"{count} warm standbys\n{self.output()}", ready)
        return value

    def agents(self, index: int = 0) -> dict[str, int]:
        """node -> pid of its agent: children of the launcher that run tmrun_agent with a config named after their node."""
        found = {}
        for pid in procs.children(self.launches[index].pid):
            argv = command_line(pid).split()
            if "tmrun_agent" in argv:
                found[Path(argv[-1]).stem] = pid
        return found

    def etcds(self, index: int = 0) -> list[int]:
        """Pids of the embedded etcds, the children of their guards."""
        guards = [p for p in procs.children(self.launches[index].pid) if "guard.py" in command_line(p)]
        return [pid for guard in guards for pid in procs.children(guard)]

    def trains(self, steps: int = 3) -> dict[str, Any]:
        """Until the workers have done so many steps (more); the status."""

        def ready() -> dict[str, Any] | None:
            value = self.status()
            return value if value and (value["step"] or 0) >= steps else None

        value: dict[str, Any] = wait_for(f"step {steps}", ready)
        return value

    def go_fast(self) -> None:
        (self.folder / "fast").touch()

    def finish(self, index: int = 0, deadline_s: float = DEADLINE_S) -> int:
        """Let the steps run at full speed; the launcher's exit code."""
        self.go_fast()
        return self.launches[index].wait(deadline_s)

    def output(self, index: int = 0) -> str:
        return self.logs[index].read_text()

    def final_hash(self, *indices: int) -> str:
        lines = [line for i in indices or (0,) for line in self.output(i).splitlines() if line.startswith("final parameters sha256")]
        assert len(lines) == 1, self.output()
        return lines[0].split()[-1]

    def read_losses(self) -> dict[int, dict[int, str]]:
        """rank -> step -> exact loss. A step that was logged twice must have had the same loss."""
        found: dict[int, dict[int, str]] = {}
        for rank in range(WORLD):
            path = self.losses / f"rank{rank}.txt"
            steps: dict[int, str] = {}
            for line in path.read_text().splitlines() if path.exists() else ():
                step, loss = line.split()
                assert steps.setdefault(int(step), loss) == loss, f"rank {rank} step {step}: two different losses"
            found[rank] = steps
        return found

    def living(self, pids: Iterable[int]) -> set[int]:
        """Those that are processes of this lab: a busy machine gives process ids to others quickly."""
        return set(pids) & set(procs.marked(self.marker, "TEST_LAB"))

    def leftovers(self) -> list[str]:
        processes = [f"pid {p}: {command_line(p)}" for p in procs.marked(self.marker, "TEST_LAB")]
        files = [str(p) for p in (self.folder / "tmp").glob("tmrun*")]
        return processes + files

    def close(self) -> None:
        for launch in self.launches:
            if launch.poll() is None:
                launch.send_signal(signal.SIGKILL)
                launch.wait()
        procs.sweep(self.marker, "TEST_LAB")


def command_line(pid: int) -> str:
    """Its arguments, with spaces between."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "ended"


def make_lab(folder: Path) -> Lab:
    (folder / "tmp").mkdir(parents=True)
    lab = Lab(folder)
    lab.losses.mkdir()
    return lab


@dataclass(frozen=True)
class Oracle:
    """What the uninterrupted run computed."""

    losses: dict[int, dict[int, str]]
    final_hash: str
