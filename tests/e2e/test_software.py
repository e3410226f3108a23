"""Errors of the program itself: a standby is not used up by what would follow the ranks."""

from __future__ import annotations

import json
import os
import signal

import pytest
from e2e_lab import DEADLINE_S, Lab, Oracle, frozen, wait_for
from test_hangs import inject
from test_training_goes_on import LOCAL


def test_exception_and_exit_code_restart_everybody_within_the_budget(lab: Lab) -> None:
    """Twice the program fails, twice everything starts again in place, and the standby stays one; the third time it is over, and that is
    reported, not the kill that the standby had healed."""
    error = lab.folder / "error.json"
    lab.launch(*LOCAL, "--max-restarts", "2", TEST_FAULT=str(lab.folder / "fault"), TEST_PACE_S="0.3", TORCHELASTIC_ERROR_FILE=str(error))
    for epoch, kind, text in ((2, "raise", "exit code 1"), (3, "exit", "exit code 3")):
        lab.wait_warm()
        inject(lab, 3, kind)
        row = wait_for(f"epoch {epoch}", lambda want=epoch: next((r for r in lab.history() if r["epoch"] == want), None))
        assert (row["cause"], row["leaver"]) == ("restart", "")
        assert text in row["reason"]
        assert [n["slot"] for n in lab.status()["nodes"]] == [0, 1, None]
    before = lab.wait_warm()
    os.kill(next(n["pids"][0] for n in before["nodes"] if 0 in n["ranks"]), signal.SIGKILL)
    wait_for("its ranks have moved", lambda: [r["cause"] for r in lab.history()][3:] == ["failure"])
    lab.trains(before["step"] + 3)
    inject(lab, 3, "exit")
    assert lab.launches[0].wait(DEADLINE_S) == 3
    report = lab.output().partition("FAILED, after 2 restarts")[2]
    assert "rank      : 3 (local_rank: 1)" in report
    assert "SIGKILL" not in report, "what a standby healed has not ended the job"
    assert json.loads(error.read_text())["message"]["errorCode"] == 3


def test_the_program_fails_while_the_store_is_away(lab: Lab, oracle: Oracle) -> None:
    """Nothing can be decided then, and all leases are gone when the store is back: still the program is to blame and no node is used up."""
    fault = str(lab.folder / "fault")
    lab.launch(*LOCAL, "--max-restarts", "2", "--lease-ttl", "3", TEST_FAULT=fault, TEST_PACE_S="0.3")
    for epoch, kind, text in ((2, "raise", "exit code 1"), (3, "exit", "exit code 3")):
        lab.wait_warm()
        with frozen(lab.etcds(), 6):
            inject(lab, 3, kind)
        row = wait_for(f"epoch {epoch}", lambda want=epoch: next((r for r in lab.history() if r["epoch"] == want), None))
        assert (row["cause"], row["leaver"]) == ("restart", "")
        assert f"rank 3: {text}" in row["reason"]
        wait_for("a standby is there again", lambda: {n["slot"] for n in lab.status()["nodes"]} == {0, 1, None})  # who registers first
    lab.trains()
    assert lab.finish() == 0
    assert lab.final_hash() == oracle.final_hash


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
if dist.get_rank() == 1:
    {then}
"""


NODES = pytest.mark.parametrize("nodes", [("1", "--nproc-per-node", "2"), ("2",)], ids=["same node", "another node"])


@NODES
def test_a_rank_that_leaves_the_loop_alone_is_named(lab: Lab, nodes: tuple[str, ...]) -> None:
    """It ends well, so nobody has died; without it the others could only wait."""
    script = lab.folder / "leaves.py"
    script.write_text(LEAVES.format(then="pass"))
    lab.launch("--local-nodes", nodes[0], "--nnodes", *nodes, "--lease-ttl", "3", script=script, script_args=())
    assert lab.launches[0].wait(DEADLINE_S) == 1
    assert "job failed: rank 1 ended well while others train: do all run the same number of steps? (node0: a worker lost" in lab.output()


@NODES
@pytest.mark.parametrize("then", ["time.sleep(3600)", "dist.destroy_process_group(); time.sleep(3600)"], ids=["waits", "hangs up"])
def test_a_rank_that_leaves_the_loop_alone_and_lives_on_is_named(lab: Lab, nodes: tuple[str, ...], then: str) -> None:
    """With its connections open, the others wait until they are late; without, they lose it. No restart heals either."""
    script = lab.folder / "leaves.py"
    script.write_text(LEAVES.format(then=then))
    flags = ("--lease-ttl", "3", "--hang-timeout", "3")
    lab.launch("--local-nodes", nodes[0], "--nnodes", *nodes, *flags, script=script, script_args=())
    assert lab.launches[0].wait(DEADLINE_S) == 1
    told = lab.output()
    assert "job failed: rank 1 left the loop" in told
    assert "do all run the same number of steps?" in told
    assert "epoch 2" not in told, told + "nothing was restarted"
