"""The example runs unchanged everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import ROOT, STEPS, Cluster

EXAMPLE = str(ROOT / "examples" / "gpt_ddp.py")


def run(*command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    for _ in range(3):  # a process of torch's own may abort at its very end: "terminate called without an active exception"
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_python_learns(tmp_path: Path) -> None:
    lines = run(EXAMPLE, "--steps", "40", "--print-every", "39", "--log-losses", str(tmp_path)).splitlines()
    losses = [float.fromhex(line.split()[1]) for line in (tmp_path / "rank0.txt").read_text().splitlines()]
    assert len(losses) == 40
    assert losses[-1] < 0.6 * losses[0]
    assert lines[-1].startswith("final parameters sha256 ")


@pytest.mark.parametrize("world", [2])
def test_torchrun_and_tmrun_agree(cluster: Callable[..., Cluster], same: Callable[..., None], world: int) -> None:
    torchrun = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), EXAMPLE, "--steps", str(STEPS))
    job = cluster(world, fresh=True)
    job.start()
    same(job)
    assert set(re.findall(r"[0-9a-f]{64}", torchrun)) == {job.finish()}  # every rank may print it, and on one line
