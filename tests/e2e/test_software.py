"""Errors of the program itself: a standby is not used up by what would follow the ranks."""

from __future__ import annotations

import pytest
from e2e_lab import DEADLINE_S, Lab, wait_for
from test_hangs import inject
from test_training_goes_on import LOCAL


def test_exception_and_exit_code_restart_everybody_within_the_budget(lab: Lab) -> None:
    """Twice the program fails, twice everything starts again in place, and the standby stays one; the third time it is over."""
    lab.launch(*LOCAL, "--max-restarts", "2", TEST_FAULT=str(lab.folder / "fault"), TEST_PACE_S="0.3")
    for epoch, kind, text in ((2, "raise", "exit code 1"), (3, "exit", "exit code 3")):
        lab.wait_warm()
        inject(lab, 3, kind)
        row = wait_for(f"epoch {epoch}", lambda want=epoch: next((r for r in lab.history() if r["epoch"] == want), None))
        assert (row["cause"], row["leaver"]) == ("restart", "")
        assert text in row["reason"]
        assert [n["slot"] for n in lab.status()["nodes"]] == [0, 1, None]
    lab.trains()
    inject(lab, 3, "exit")
    assert lab.launches[0].wait(DEADLINE_S) == 3
    assert "after 2 restarts" in lab.output()


LEAVES = """\
import time
import torch, torch.distributed as dist
import tmrun
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in tmrun.join(model=model, optimizer=optimizer).steps(1000):
    with step:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.1)
    if dist.get_rank() == 1 and step == 10:
        break
"""


@pytest.mark.parametrize("nodes", [("1", "--nproc-per-node", "2"), ("2",)], ids=["same node", "another node"])
def test_a_rank_that_leaves_the_loop_alone_is_named(lab: Lab, nodes: tuple[str, ...]) -> None:
    """It ends well, so nobody has died; without it the others could only wait."""
    script = lab.folder / "leaves.py"
    script.write_text(LEAVES)
    lab.launch("--local-nodes", nodes[0], "--nnodes", *nodes, "--lease-ttl", "3", script=script, script_args=())
    assert lab.launches[0].wait(DEADLINE_S) == 1
    assert "job failed: rank 1 ended well while others train: do all run the same number of steps? (node0: a worker lost" in lab.output()
