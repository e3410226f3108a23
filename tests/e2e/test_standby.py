"""The pool of standbys: compared with the job's machines, any role, filled again after each use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from e2e_lab import DEADLINE_S, Lab, Oracle, wait_for
from test_training_goes_on import LOCAL, assert_exact, settled

MATRIX = Path(__file__).resolve().parents[1] / "worker" / "matrix.py"


def test_one_is_judged_takes_a_role_it_did_not_rehearse_and_is_replaced(lab: Lab, oracle: Oracle) -> None:
    """A slow rehearsal is told, and chosen all the same when there is no other; whoever it replaced warms up in its place."""
    slow = lab.folder / "slow"
    slow.touch()
    lab.launch(*LOCAL, TEST_SLOW_REHEARSAL=str(slow), TEST_PACE_S="0.5", TEST_EXTRA="1")
    lab.wait_warm()
    wait_for("the slow one is told", lambda: "chosen last: slow: a rehearsed step took" in lab.node("node2")["reason"])
    spare = lab.node("node2")
    assert (spare["state"], spare["rehearsal"]["rank"] // 2, spare["rehearsal"]["steps"]) == ("standby", 1, 3)
    assert spare["rehearsal"]["step_s"] > 1.5
    assert spare["rehearsal"]["inside"]["gloo on cpu"] > 0 and spare["rehearsal"]["also"] == [], "two workers met; all ranks are alike"
    slow.unlink()

    os.kill(lab.node("node0")["pids"][0], signal.SIGKILL)  # slot 0: another role
    rows = settled(lab, 2)
    assert (rows[1]["leaver"], rows[1]["joiner"], rows[1]["ranks"]) == ("node0", "node2", [0, 1])
    assert rows[1]["cold"]["collective all_reduce"], "the joiner's first step met it, its rehearsal did not"
    lab.wait_warm()  # the pool is filled again, by the node whose worker died
    wait_for("it is as good as the job's", lambda: (lab.node("node0")["state"], lab.node("node0")["reason"]) == ("standby", "warm"))
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=2)


def test_one_rehearses_every_stage_of_a_pipeline(lab: Lab) -> None:
    """Stages differ; it is warm as the last one first, and needed as the first."""
    flags = ("--local-nodes", "3", "--nnodes", "2", "--nproc-per-node", "1", "--standby", "1")
    stages = {"TEST_MODE": "pp", "TEST_UNEVEN": "1", "OMP_NUM_THREADS": "1"}
    (alone := lab.folder / "alone").mkdir()
    (alone / "fast").touch()
    theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = (str(MATRIX), "--steps", "400", "--log-losses")
    lab.launch(*flags, script=MATRIX, script_args=(*arguments[1:], str(lab.losses)), TEST_PACE_S="0.3", TMRUN_SNAPSHOT_EVERY="3", **stages)
    lab.wait_warm()
    environment = lab.environment(**stages, TEST_REFERENCE="1")
    oracle = subprocess.run([*theirs, *arguments, str(alone)], env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert oracle.returncode == 0
    wait_for(f"the other role\n{lab.output()}", lambda: (lab.node("node2").get("rehearsal") or {}).get("also") == [0])
    assert (lab.node("node2")["rehearsal"]["rank"], lab.node("node2")["state"]) == (1, "standby")
    os.kill(lab.node("node0")["pids"][0], signal.SIGKILL)
    rows = settled(lab, 2)
    assert (rows[1]["leaver"], rows[1]["joiner"], rows[1]["ranks"]) == ("node0", "node2", [0])
    (lab.losses / "fast").touch()
    assert lab.finish() == 0
    assert lab.final_hash() == oracle.stdout.split()[-1]
