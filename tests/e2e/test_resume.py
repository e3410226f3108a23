"""A script that resumes from its checkpoints, as docs/movable.md says: all start anew, then a standby that came later takes a rank over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from e2e_lab import DEADLINE_S, Lab, wait_for

SCRIPT = """\
import hashlib, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import tmrun

TOTAL, folder = 80, Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()

def newest_checkpoint():
    return max((int(p.stem) for p in folder.glob("*.pt")), default=0)

start = [newest_checkpoint() if rank == 0 else 0]
dist.broadcast_object_list(start)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
if start[0]:
    saved = torch.load(folder / f"{start[0]}.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
run = tmrun.join(model=model, optimizer=optimizer)
if not run.rehearsing:
    print(f"rank {rank} begins at {start[0]}", flush=True)
for step in run.steps(TOTAL - start[0]):
    number = start[0] + step
    with step:
        torch.manual_seed(1000 * number + rank)
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    while not run.rehearsing and number % 10 == 5 and not (folder / f"go{number}").exists():
        time.sleep(0.05)
    if step.committed and rank == 1 and number == 25 and start[0] == 0:
        raise RuntimeError("the program's own")
    if step.committed and rank == 0 and number % 10 == 9:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "new")
        os.rename(folder / "new", folder / f"{number + 1}.pt")
if rank == 0:
    print("final", hashlib.sha256(repr([p.tolist() for p in model.parameters()]).encode()).hexdigest(), flush=True)
"""
HELD = range(5, 80, 10)


def final(text: str) -> str:
    (found,) = re.findall(r"^final (\w+)$", text, re.MULTILINE)
    return found


def test_all_start_anew_from_the_checkpoint_and_a_later_standby_takes_over(lab: Lab) -> None:
    reference = undisturbed(lab)
    script, job = lab.folder / "resume.py", lab.folder / "job"
    script.write_text(SCRIPT)
    job.mkdir()
    lab.launch("--local-nodes", "3", "--nnodes", "2", "--standby", "1", "--max-restarts", "1", script=script, script_args=(str(job),))
    wait_for("a warm standby", lambda: lab.status().get("standby", {}).get("warm"))
    go(job, 5, 15, 25)
    wait_for("all begin anew", lambda: len(re.findall(r"^rank \d begins at 20$", lab.output(), re.MULTILINE)) == 2)
    go(job, 35, 45)
    wait_for("a newer checkpoint", lambda: (job / "50.pt").exists())
    wait_for("a warm standby", lambda: lab.status().get("standby", {}).get("warm"))
    victim = next(n for n in lab.status()["nodes"] if n["ranks"] == [1])
    os.kill(victim["pids"][0], signal.SIGKILL)
    go(job, *HELD)
    assert lab.launches[0].wait(DEADLINE_S) == 0, lab.output()
    assert f"epoch 3 failure {victim['name']} -> " in lab.output()
    assert final(lab.output()) == reference


def go(folder: Path, *held: int) -> None:
    """Let the job pass these steps."""
    for number in held:
        (folder / f"go{number}").touch()


def undisturbed(lab: Lab) -> str:
    """What the same script computes under torchrun, without its error."""
    script, folder = lab.folder / "undisturbed.py", lab.folder / "undisturbed"
    script.write_text(SCRIPT.replace("start[0] == 0:", "False:"))
    folder.mkdir()
    go(folder, *HELD)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(folder)]
    done = subprocess.run(argv, env=lab.environment(), text=True, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return final(done.stdout)
