"""Errors of the program itself: a standby is not used up by what would follow the ranks."""

from __future__ import annotations

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
