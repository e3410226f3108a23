"""Each flag through a launch of torchrun and one of tmrun: workers print the same lines, files hold the same, both end alike."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, Lab, free_port

SCRIPT = """
import os, sys
e = os.environ
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
names += " TORCHELASTIC_MAX_RESTARTS CUDA_VISIBLE_DEVICES TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS TORCHELASTIC_SIGNALS_TO_HANDLE"
said = " ".join(str(e.get(n)) for n in names.split())
sys.stdout.write(f"{__name__} {sys.argv[1:]} {said}\\n")
sys.stdout.write(f"keep {e['RANK']}\\n")
sys.stderr.write(f"trouble {e['RANK']}\\n")
if "fail" in sys.argv and e["RANK"] == "1" and e["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(5)
"""
TWO = ("--nproc-per-node", "2")
CASES = {
    "script": (*TWO, "{script}", "--lr=1", "-m", "--nnodes", "3", "--", "x y"),
    "underscores": ("--nproc_per_node=2", "--max_restarts=2", "{script}"),
    "abbreviated": ("--nproc-per", "2", "--standal", "{script}"),
    "module": (*TWO, "-m", "package.train", "--a", "b"),
    "run path": (*TWO, "--run-path", "{script}", "a"),
    "no python": (*TWO, "--no-python", sys.executable, "{script}", "at${{local_rank}}"),
    "local rank": (*TWO, "{script}", "at${{local_rank}}"),
    "virtual local rank": (*TWO, "--virtual-local-rank", "{script}"),
    "role": (*TWO, "--role", "trainer", "{script}"),
    "cpu": ("--nproc-per-node", "cpu", "{script}"),
    "one": ("{script}",),
    "standalone": ("--standalone", *TWO, "{script}"),
    "static": ("--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "{port}", *TWO, "{script}"),
    "c10d": ("--nnodes", "1:1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}", "--rdzv-id", "a", *TWO, "{script}"),
    "no meaning here": ("--start-method", "fork", "--monitor-interval", "0.05", "--rdzv-conf", "timeout=60", *TWO, "{script}"),
    "restarts": ("--max-restarts", "1", *TWO, "{script}", "fail"),
    "signals": ("--signals-to-handle", "SIGTERM,SIGUSR1", *TWO, "{script}"),
    "filter": (*TWO, "--local-ranks-filter", "1", "{script}"),
    "tee": (*TWO, "--tee", "3", "--log-dir", "{logs}", "{script}"),
    "redirect all": (*TWO, "-r", "3", "--log-dir", "{logs}", "{script}"),
    "redirect and tee by rank": (*TWO, "-r", "0:1", "-t", "1:3", "--log-dir", "{logs}", "{script}"),
    "filters of lines": (*TWO, "--tee", "3", "--log-dir", "{logs}", "--duplicate-stdout-filters", "keep", "{script}"),
}


@dataclass(frozen=True)
class Seen:
    """Of one launch: console and files."""

    code: int
    stdout: list[str]
    stderr: list[str]
    files: dict[str, list[str]]


def seen(run: subprocess.CompletedProcess[str], logs: Path) -> Seen:
    """stderr: the workers' lines only; launchers have words of their own. Lines in order, for several workers may write to one file."""
    files = {"/".join(p.relative_to(logs).parts[1:]): sorted(p.read_text().splitlines()) for p in logs.rglob("*.log") if p.stat().st_size}
    return Seen(run.returncode, sorted(run.stdout.splitlines()), sorted(x for x in run.stderr.splitlines() if "trouble" in x), files)


@pytest.mark.parametrize("name", CASES)
def test_the_same_lines(lab: Lab, tmp_path: Path, name: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    env = lab.environment(PYTHONPATH=":".join([str(tmp_path), *sys.path[1:]]))

    def run(launcher: str, module: str) -> Seen:
        logs = tmp_path / launcher
        flags = [x.format(script=script, logs=logs, port=free_port()) for x in CASES[name]]
        argv = [sys.executable, "-m", module, *flags]
        done = subprocess.run(argv, env=env, text=True, capture_output=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
        print(done.stdout, done.stderr)
        return seen(done, logs)

    with ThreadPoolExecutor(2) as pool:
        theirs, ours = pool.map(run, ("theirs", "ours"), ("torch.distributed.run", "tmrun"))
    assert ours == theirs
    assert theirs.code == 0
    assert theirs.stdout or theirs.files
