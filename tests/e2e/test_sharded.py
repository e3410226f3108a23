"""Sharded examples through the whole launcher: a drain, then a kill, and every parameter is bitwise that of torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, GPT, Lab, wait_for

STEPS = 60
NPROC = {"fsdp2": 1, "tp": 1, "pp": 1, "hsdp": 2}


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def start_torchrun(example: str, folder: Path, world: int) -> subprocess.Popen[str]:
    folder.mkdir()
    environment = {**os.environ, "TEST_SCRIPT": f"{example}.py", "TEST_PACE_S": "0", "TEST_HASHES": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return subprocess.Popen([*command, str(GPT), "--steps", str(STEPS)], text=True, stdout=subprocess.PIPE, env=environment)


@pytest.mark.parametrize("example", NPROC)
def test_drained_then_killed(lab: Lab, example: str) -> None:
    """HSDP has a replica of every shard; the others go back to copies in a partner's memory."""
    (lab.folder / "hashes").mkdir()
    lab.launch(
        *("--local-nodes", "4", "--nnodes", "2", "--nproc-per-node", str(NPROC[example]), "--standby", "2"),
        script_args=("--steps", str(STEPS)),
        TEST_SCRIPT=f"{example}.py",
        TEST_HASHES=str(lab.folder / "hashes"),
        TEST_PACE_S="0.2" if example == "pp" else "0.8",
        TMRUN_SNAPSHOT_EVERY="2",
        OMP_NUM_THREADS="1",
    )
    before = lab.wait_warm(2)
    with start_torchrun(example, lab.folder / "expected", 2 * NPROC[example]) as reference:  # the job sleeps most of its time
        assert lab.cli("drain", "node1").returncode == 0, lab.output()
        drained = lab.status()
        lab.trains(drained["step"] + 6)
        lab.wait_warm()
        os.kill(drained["nodes"][2]["pids"][0], signal.SIGKILL)
        wait_for(f"the second migration\n{lab.output()}", lambda: len(lab.history()) == 3 and lab.history()[-1]["pause_s"] is not None)
        rows = lab.history()
        assert [(r["cause"], r["leaver"]) for r in rows[1:]] == [("drain", "node1"), ("failure", "node2")]
        assert lab.node("node0")["pids"] == before["nodes"][0]["pids"], "the stayers were restarted"
        assert lab.finish() == 0
        printed = reference.communicate(timeout=DEADLINE_S)[0].splitlines()
        assert reference.returncode == 0
        assert hashes(lab.folder / "hashes") == hashes(lab.folder / "expected")
        assert list(dict.fromkeys(line for line in lab.output().splitlines() if line.startswith("step "))) == printed
