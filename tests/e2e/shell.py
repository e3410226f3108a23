"""A terminal of somebody who follows the documentation."""

from __future__ import annotations

import subprocess
import sys

from e2e_lab import DEADLINE_S, ROOT, Lab


class Shell:
    """A terminal in a folder that looks like the clone, where `tmrun` and `python` are ours."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.folder = lab, lab.folder
        (self.folder / "examples").symlink_to(ROOT / "examples")
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for name, argv in (("python", f"{sys.executable}"), ("tmrun", f"{sys.executable} -m tmrun")):
            self.program(name, f'#!/bin/sh\nexec {argv} "$@"\n')

    def program(self, name: str, text: str) -> None:
        """A command of this name."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return self.lab.environment(PATH=f"{self.bin}:/usr/bin:/bin", PYTHONPATH=f"{ROOT}:{ROOT / 'agents'}")

    def run(self, line: str, *, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            env=self.environment, cwd=self.folder, text=True, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, line: str) -> subprocess.Popen[str]:
        """In the background, as one of the lab's launches."""
        log = self.folder / f"launch{len(self.lab.launches)}.log"
        with log.open("w") as out:
            started = subprocess.Popen(
                ["bash", "-c", line],
                env=self.environment, cwd=self.folder, text=True, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.lab.launches.append(started)
        self.lab.logs.append(log)
        return started

    def must(self, line: str, *, timeout_s: float = DEADLINE_S) -> str:
        done = self.run(line, timeout_s=timeout_s)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout
