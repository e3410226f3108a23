"""Frameworks that bring their own idea of a launcher, under torchrun and under tmrun: the same losses, the same exit code.

Skipped where they are not installed: they are larger than tmrun and all it needs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, Lab, wait_for
from test_dropin import said

ACCELERATE = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
set_seed(3)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    sys.stdout.write(f"loss {accelerator.process_index} {step} {loss.item().hex()}\\n")
assert gather_object([accelerator.process_index]) == [0, 1]
accelerator.end_training()
"""
LIGHTNING = """
import sys
import lightning
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, index):
        out = super().training_step(batch, index)
        sys.stdout.write(f"loss {self.global_rank} {index} {out['loss'].item().hex()}\\n")
        return out

lightning.seed_everything(7)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, limit_train_batches=4, limit_val_batches=1, **quiet)
trainer.fit(Model())
assert type(trainer.strategy.cluster_environment).__name__ == "TorchElasticEnvironment"
"""


ABORTS = "terminate called without an active exception"
"""At the end of a program that is done: a thread of torch 2.13 still runs when the interpreter exits. Of 20 runs of ACCELERATE on a busy
machine 5 under torchrun and 1 under tmrun ended so."""


def launched(lab: Lab, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A launch that torch did not abort."""
    for _ in range(5):
        argv = [sys.executable, "-m", module, *arguments]
        run = subprocess.run(argv, env=lab.environment(), text=True, capture_output=True, timeout=DEADLINE_S, check=False)
        if ABORTS not in run.stderr:
            break
    return run


@pytest.mark.parametrize(("package", "text", "steps"), [("accelerate", ACCELERATE, 4), ("lightning", LIGHTNING, 4)])
def test_the_same_losses(lab: Lab, tmp_path: Path, package: str, text: str, steps: int) -> None:
    pytest.importorskip(package, reason="not a dependency of tmrun; install it to run this", exc_type=ImportError)
    script = tmp_path / "train.py"
    script.write_text(text)
    theirs, ours = (launched(lab, module, "--nproc-per-node", "2", str(script)) for module in ("torch.distributed.run", "tmrun"))
    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr + ours.stderr
    assert said(ours.stdout, "loss") == said(theirs.stdout, "loss")
    assert len(said(ours.stdout, "loss")) == 2 * steps


MOVABLE = """
import sys, time, hashlib, pathlib, torch
import tmrun
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
sampler = torch.utils.data.distributed.DistributedSampler(data, accelerator.num_processes, accelerator.process_index)
batches = tmrun.Batches(torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler))
model, optimizer = accelerator.prepare(model, optimizer)
fast = pathlib.Path(sys.argv[1])
for step in tmrun.join(model=model, optimizer=optimizer, batches=batches).steps(120):
    with step:
        x, y = next(batches)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        time.sleep(0 if fast.exists() else 0.5)
if accelerator.is_main_process:
    parts = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("final parameters sha256", hashlib.sha256(parts).hexdigest(), flush=True)
accelerator.end_training()
"""


def test_accelerate_moves(lab: Lab, tmp_path: Path) -> None:
    """A drain and a kill under the loop that Accelerate leaves to the script; the parameters are torchrun's."""
    pytest.importorskip("accelerate", reason="not a dependency of tmrun; install it to run this", exc_type=ImportError)
    script = tmp_path / "train.py"
    script.write_text(MOVABLE)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path)]
    theirs = subprocess.run(argv, env=lab.environment(), text=True, capture_output=True, timeout=DEADLINE_S, check=True)
    fast = str(lab.folder / "fast")
    lab.launch("--local-nodes", "4", "--nnodes", "2", "--standby", "2", script=script, script_args=(fast,))
    lab.wait_warm(2)
    assert lab.cli("drain", "node1").returncode == 0
    victim = next(n for n in lab.status()["nodes"] if n["ranks"] and n["name"] != "node0")
    os.kill(victim["pids"][0], signal.SIGKILL)
    wait_for("the rank is replaced", lambda: len(lab.history()) == 3)
    assert lab.finish() == 0
    assert f"final parameters sha256 {lab.final_hash()}" in theirs.stdout
    assert "not given to tmrun.join" not in lab.output()
