"""Nobody asks for these drains by hand: a preemption notice, a slow node, SIGTERM to an agent; all on one job, which stays exact."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from e2e_lab import Lab, Oracle, wait_for
from test_training_goes_on import assert_exact


def holder(lab: Lab, slot: int) -> str:
    return str(next(n["name"] for n in lab.status()["nodes"] if n["slot"] == slot))


def moved(lab: Lab, leaver: str, why: str) -> dict[str, Any]:
    """Its ranks were drained for this reason. On a busy machine another node may be found slow before that: that is no error."""

    def row() -> dict[str, Any] | None:
        return next((r for r in lab.history() if (r["cause"], r["leaver"]) == ("drain", leaver) and why in r["reason"]), None)

    found: dict[str, Any] = wait_for(f"{leaver} drained: {why}", row)
    return found


def test_notice_sigterm_and_slow_node(lab: Lab, oracle: Oracle) -> None:
    slow = lab.folder / "slow"
    four = ("--local-nodes", "4", "--nnodes", "2", "--nproc-per-node", "2", "--standby", "2")
    lab.launch(*four, "--straggler", "drain", TEST_SLOW=str(slow), TEST_PACE_S="1.6")
    lab.wait_warm(2)
    stayer = holder(lab, 0)
    pids = lab.node(stayer)["pids"]

    leaver = holder(lab, 1)
    (folder,) = {p.parent for p in (lab.folder / "tmp").rglob(f"{leaver}.json")}
    notice = Path(folder) / f"{leaver}.notice"
    notice.write_text("spot reclaim in 2 minutes")
    moved(lab, leaver, "spot reclaim")
    assert "spot reclaim" in lab.node(leaver)["reason"]
    notice.unlink()  # the machine stays after all
    wait_for("it is a standby", lambda: lab.node(leaver)["state"] == "standby")

    gone = holder(lab, 1)
    os.kill(lab.agents()[gone], signal.SIGTERM)
    moved(lab, gone, "SIGTERM")
    wait_for("its agent ends", lambda: gone not in lab.agents())
    lab.wait_warm()

    slower = holder(lab, 1)
    slow.write_text(f"{slower} 0.45")
    moved(lab, slower, "slow: computes 1.")
    assert lab.node(stayer)["pids"] == pids, "the stayers were restarted"
    assert lab.finish() == 0
    assert_exact(lab, oracle)
