"""Nothing has died, and nothing goes on: who keeps the others waiting is named, ended and replaced; training stays exact."""

from __future__ import annotations

from e2e_lab import Lab, Oracle, wait_for
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
    for sign in ("stopped by a signal", "in _loop", "holds the GIL", "entered 1 of its collectives, others 2"):
        assert sign in told, sign
    assert "most recent call first" in told, "no stacks in the log"
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=2 * len(FAULTS))
