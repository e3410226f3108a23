"""Frameworks that bring their own idea of a launcher, under torchrun and under tmrun: the same losses, the same exit code.

Skipped where they are not installed: they are larger than tmrun and all it needs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, Lab
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


@pytest.mark.parametrize(("package", "text", "steps"), [("accelerate", ACCELERATE, 4), ("lightning", LIGHTNING, 4)])
def test_the_same_losses(lab: Lab, tmp_path: Path, package: str, text: str, steps: int) -> None:
    pytest.importorskip(package, reason="not a dependency of tmrun; install it to run this", exc_type=ImportError)
    script = tmp_path / "train.py"
    script.write_text(text)
    flags = ("--nproc-per-node", "2", str(script))
    argv = [sys.executable, "-m", "torch.distributed.run", *flags]
    theirs = subprocess.run(argv, env=lab.environment(), text=True, capture_output=True, timeout=DEADLINE_S, check=False)
    ours = lab.cli(*flags)
    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr + ours.stderr
    assert said(ours.stdout, "loss") == said(theirs.stdout, "loss")
    assert len(said(ours.stdout, "loss")) == 2 * steps
