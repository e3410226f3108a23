"""Nodes that are slow, and nodes that only seem so: noise accuses nobody, who needs three times as long is drained, and stays drained."""

from __future__ import annotations

from e2e_lab import Lab, Oracle, frozen, wait_for
from test_leaving import holder, moved
from test_training_goes_on import LOCAL, assert_exact

AWAY_S = 8.0
"""More than a look at all nodes takes."""


def test_noise_then_three_times_slower(lab: Lab, oracle: Oracle) -> None:
    """Steps vary by a fifth, in every rank; then one node computes three times as long, beginning while the store is away."""
    slow = lab.folder / "slow"
    lab.launch(*LOCAL, "--straggler", "drain", "--lease-ttl", "4", TEST_SLOW=str(slow), TEST_NOISE="0.2", TEST_PACE_S="0.8")
    lab.wait_warm()
    lab.trains(70)
    assert "is slow" not in lab.output(), "nobody was"
    before = lab.status()
    slower, stayer = holder(lab, 1), holder(lab, 0)
    with frozen(lab.etcds(), AWAY_S):
        slow.write_text(f"{slower} 1.6")
    row = moved(lab, slower, "slow: computes ")
    ratio = float(row["reason"].partition("computes ")[2].split()[0])
    assert 2 < ratio < 4, row["reason"]
    assert lab.node(stayer)["pids"] == next(n["pids"] for n in before["nodes"] if n["name"] == stayer), "the stayers were restarted"
    wait_for("it is drained", lambda: lab.node(slower)["state"] == "drained")
    assert lab.finish() == 0
    assert_exact(lab, oracle)
