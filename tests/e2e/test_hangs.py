"""Nothing has died, and nothing goes on: who keeps the others waiting is named, ended and replaced; training stays exact."""

from __future__ import annotations

import os
import signal

from e2e_lab import DEADLINE_S, Lab, Oracle, wait_for
from test_training_goes_on import LOCAL, assert_exact

FAULTS = ("stop", "loop", "gil", "skip")


def inject(lab: Lab, rank: int, kind: str) -> None:
    """The rank does ``kind`` in its next forward pass."""
    plan = lab.folder / "fault"
    plan.with_suffix(".new").write_text(f"{rank} {kind}")
    plan.with_suffix(".new").rename(plan)


def test_one_hang_after_the_other(lab: Lab, oracle: Oracle) -> None:
    """A frozen process, an endless loop, a held GIL, a collective that one rank never enters: four times the right node is blamed."""
    lab.launch(*LOCAL, "--hang-timeout", "3", TEST_FAULT=str(lab.folder / "fault"), TEST_EXTRA="1", TEST_PACE_S="1.8")
    epoch = 1
    for number, kind in enumerate(FAULTS):
        before = lab.wait_warm()
        rank = number % 4
        victim = next(n for n in before["nodes"] if rank in n["ranks"])
        stayer = next(n for n in before["nodes"] if n["ranks"] and n is not victim)
        inject(lab, rank, kind)
        epoch += 1
        row = wait_for(f"epoch {epoch} after {kind}", lambda want=epoch: next((r for r in lab.history() if r["epoch"] == want), None))
        assert (row["cause"], row["leaver"], row["ranks"]) == ("failure", victim["name"], victim["ranks"]), (kind, row)
        assert f"{victim['name']} rank {rank}: " in row["reason"], (kind, row["reason"])
        assert lab.node(stayer["name"])["pids"] == stayer["pids"], f"{kind}: the stayers were restarted"
        wait_for(f"the workers of {victim['name']} ended", lambda v=victim: not lab.living(v["pids"]))
        lab.trains(lab.trains()["step"] + 2)
    told = lab.output()
    for sign in ("stopped by a signal", "in _loop", "entered 1 of its collectives, others 2"):
        assert sign in told, sign
    assert "holds the GIL" in told or "in <lambda>" in told  # on a busy machine its lateness may be noticed first
    assert "most recent call first" in told, "no stacks in the log"
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=2 * len(FAULTS))


def test_a_hang_is_told_only(lab: Lab, oracle: Oracle) -> None:
    """``--hang-action notify``: the node to blame is named, nobody is ended, and when the worker goes on so does the job."""
    flags = ("--hang-timeout", "3", "--hang-action", "notify")
    lab.launch(*LOCAL, *flags, TEST_FAULT=str(lab.folder / "fault"), TEST_EXTRA="1", TEST_PACE_S="1.0")
    before = lab.wait_warm()
    victim = next(n for n in before["nodes"] if 3 in n["ranks"])
    inject(lab, 3, "stop")
    wait_for("it is told", lambda: f"{victim['name']} rank 3" in lab.output() and "nothing is done yet" in lab.output())
    assert "stopped by a signal" in lab.output()
    wait_for("the status tells", lambda: any("rank 3" in c["text"] for c in lab.status().get("checks", ())))
    os.kill(victim["pids"][victim["ranks"].index(3)], signal.SIGCONT)
    lab.trains(before["step"] + 6)
    assert len(lab.history()) == 1
    assert lab.finish() == 0
    assert_exact(lab, oracle)


def test_who_cannot_be_woken_ends_itself(lab: Lab, oracle: Oracle) -> None:
    """With no watchdog: one rank waits for something that never comes when another dies; it cannot stop for the migration, so both move."""
    four = ("--local-nodes", "6", "--nnodes", "4", "--standby", "2", "--hang-timeout", "off")
    lab.launch(*four, TEST_FAULT=str(lab.folder / "fault"), TMRUN_TEST_STUCK_S="2")
    before = {n["slot"]: n for n in lab.wait_warm(2)["nodes"] if n["slot"] is not None}
    inject(lab, 1, "sleep")
    wait_for("it waits", lambda: not (lab.folder / "fault").exists())
    os.kill(before[3]["pids"][0], signal.SIGKILL)
    row = wait_for("both have moved", lambda: next((r for r in lab.history() if {1, 3} <= set(r["ranks"])), None))
    assert row["cause"] == "failure"
    assert "hangs in an operation that nothing can wake" in lab.output()
    after = {n["slot"]: n["pids"] for n in lab.status()["nodes"]}
    assert [after[slot] for slot in (0, 2)] == [before[slot]["pids"] for slot in (0, 2)]
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=4)


COMPILES = """\
import time
import torch, torch.distributed as dist
import tmrun

def compiler(graph, inputs):
    print(f"rank {dist.get_rank()} compiles", flush=True)
    time.sleep(20 if dist.get_rank() else 0)
    return graph.forward

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.compile(torch.nn.Linear(4, 4), backend=compiler))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in tmrun.join(model=model, optimizer=optimizer).steps(5):
    with step:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def test_a_compiler_is_waited_for(lab: Lab) -> None:
    """Longer than any deadline of the first steps, by the rank that compiles and by the one that waits for it."""
    script = lab.folder / "compiles.py"
    script.write_text(COMPILES)
    lab.launch("--local-nodes", "2", "--nnodes", "2", "--hang-timeout", "2", script=script, script_args=())
    assert lab.launches[0].wait(DEADLINE_S) == 0, lab.output()
    told = lab.output()
    assert told.count("rank 1 compiles") == 1, told
    assert "succeeded" in told and "epoch 2" not in told, told
