"""The whole of tmrun in front of your eyes: train, drain a node, kill another one's process, finish; then compare with torchrun.

Run by ``make demo``. Everything is real: an etcd, three node agents, six training processes, gloo, a GPT on the source text of
Python's standard library. Nothing is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STEPS = 800
GPT = Path(__file__).with_name("gpt_ddp.py")
TRAIN = [str(GPT), "--steps", str(STEPS), "--print-every", "100"]
LAUNCH = "tmrun --local-nodes 3 --nnodes 2 --nproc-per-node 2 --standby 1 examples/gpt_ddp.py"
PATIENCE_S = 300.0

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def tmrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tmrun", *arguments], text=True, capture_output=True, check=False)


def status() -> dict[str, Any]:
    answer = tmrun("status", "-o", "json", "--job", "demo")
    value: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
    return value


def say(text: str) -> None:
    console.print(f"\n[bold cyan]▌ {text}[/]")


class Training:
    """The launch, with its output shown as it comes."""

    def __init__(self) -> None:
        flags = ["--job", "demo", "--local-nodes", "3", "--nnodes", "2", "--nproc-per-node", "2", "--standby", "1"]
        argv = [sys.executable, "-m", "tmrun", *flags, *TRAIN]
        self.process = subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            console.print(f"  {line.rstrip()}", style="dim", markup=False)

    def wait_warm(self) -> dict[str, Any]:
        """Until a standby is warm; the status then."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self.process.poll() is None:
            value = status()
            if value and value["standby"]["warm"] and value["state"] == "running":
                return value
            time.sleep(0.3)
        raise SystemExit("the training ended before a standby was warm: this machine is too slow for the demo's length")

    def finish(self) -> list[str]:
        code = self.process.wait()
        self._reader.join()
        if code:
            raise SystemExit(f"the training failed with exit code {code}")
        return self.lines


def show(command: str, text: str) -> None:
    console.print(f"  [bold]$ {command}[/]")
    for line in text.splitlines():
        console.print(f"  {line}", markup=False)


def interrupted() -> tuple[str, list[dict[str, Any]], int]:
    """(final hash, history rows, processes of a stayer that kept running)."""
    training = Training()
    try:
        before = training.wait_warm()
        say("A warm standby is ready. Drain node1: its ranks move, node0's processes stay.")
        drain = tmrun("drain", "node1", "--job", "demo", "--reason", "ECC errors")
        show('tmrun drain node1 --reason "ECC errors"', drain.stdout + drain.stderr)
        kept = len(set(before["nodes"][0]["pids"]) & set(status()["nodes"][0]["pids"]))
        tmrun("undrain", "node1", "--job", "demo")
        say("node1 was repaired (tmrun undrain node1) and warms up again as the standby.")
        current = training.wait_warm()
        victim = current["nodes"][0]["pids"][0]
        say(f"kill -9 {victim}: rank 0, without warning.")
        os.kill(victim, signal.SIGKILL)
        rows = _history_of(3)
        show("tmrun status", tmrun("status", "--job", "demo").stdout)
        say("The training goes on to its end.")
        return _hash(training.finish()), rows, kept
    finally:
        if training.process.poll() is None:
            training.process.terminate()
            training.process.wait()


def _history_of(epochs: int) -> list[dict[str, Any]]:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        answer = tmrun("history", "-o", "json", "--job", "demo")
        rows: list[dict[str, Any]] = json.loads(answer.stdout)["history"] if answer.returncode == 0 else []
        if len(rows) >= epochs and rows[-1]["pause_s"] is not None:
            return rows
        time.sleep(0.2)
    raise SystemExit("the kill was not healed in time")


def _hash(lines: list[str]) -> str:
    (line,) = [x for x in lines if x.startswith("final parameters sha256")]
    return line.split()[-1]


def uninterrupted() -> str:
    """The same script under torchrun; its final hash."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *TRAIN]
    done = subprocess.run(argv, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"torchrun failed:\n{done.stderr}")
    return _hash(done.stdout.splitlines())


def main() -> int:
    say(f"Launch: {LAUNCH} --steps {STEPS}")
    final, rows, kept = interrupted()
    say("For comparison the same script under torchrun, uninterrupted (same number of steps, nothing shown).")
    reference = uninterrupted()

    table = Table(title="What happened (seconds; the phases make up the pause)", title_justify="left", box=None, pad_edge=False)
    for column in ("epoch", "what", "ranks", "pause", "detect", "bind", "comm", "state", "redo"):
        table.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)
    for row in rows[1:]:
        what = f"{row['cause']}: {row['leaver']} -> {row['joiner']}"
        phases = [f"{row[k]:.3f}" for k in ("pause_s", "detect_s", "bind_s", "comm_s", "state_s", "redo_s")]
        table.add_row(str(row["epoch"]), what, ", ".join(map(str, row["ranks"])), *phases)
    console.print()
    console.print(table)
    console.print(f"processes of node0 that lived through the drain: {kept} of 2")
    console.print(f"final parameters, interrupted twice:  {final}")
    console.print(f"final parameters, uninterrupted:      {reference}")
    if final != reference:
        console.print("[bold red]DIFFERENT[/]")
        return 1
    console.print("[bold green]bitwise equal[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
