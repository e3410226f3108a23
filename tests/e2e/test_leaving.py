"""Nobody asks for these drains by hand: a preemption notice, a slow node, SIGTERM to an agent; all on one job, which stays exact."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from e2e_lab import Lab, Oracle, wait_for
from test_training_goes_on import LOCAL, assert_exact, settled


def holder(lab: Lab, slot: int) -> str:
    return str(next(n["name"] for n in lab.status()["nodes"] if n["slot"] == slot))


def moved(lab: Lab, epoch: int, leaver: str) -> dict[str, Any]:
    row = settled(lab, epoch)[-1]
    assert (row["cause"], row["leaver"]) == ("drain", leaver), row
    return row


def test_notice_slow_node_and_sigterm(lab: Lab, oracle: Oracle) -> None:
    slow = lab.folder / "slow"
    lab.launch(*LOCAL, "--straggler", "drain", TEST_SLOW=str(slow), TEST_PACE_S="1.6")
    lab.wait_warm()
    stayer = holder(lab, 0)
    pids = lab.node(stayer)["pids"]

    leaver = holder(lab, 1)
    (folder,) = {p.parent for p in (lab.folder / "tmp").rglob(f"{leaver}.json")}
    notice = Path(folder) / f"{leaver}.notice"
    notice.write_text("spot reclaim in 2 minutes")
    moved(lab, 2, leaver)
    assert "spot reclaim" in lab.node(leaver)["reason"]
    notice.unlink()  # the machine stays after all
    lab.wait_warm()
    assert lab.node(leaver)["state"] == "standby"

    slower = holder(lab, 1)
    slow.write_text(f"{slower} 0.45")
    row = moved(lab, 3, slower)
    assert row["reason"].startswith("slow: computes 1."), row["reason"]
    slow.unlink()
    assert lab.cli("undrain", slower).returncode == 0
    lab.wait_warm()

    gone = holder(lab, 1)
    os.kill(lab.agents()[gone], signal.SIGTERM)
    moved(lab, 4, gone)
    wait_for("its agent ends", lambda: gone not in lab.agents())
    assert lab.node(stayer)["pids"] == pids, "the stayers were restarted"
    assert lab.finish() == 0
    assert_exact(lab, oracle)
