"""Failure domains: spares are spread over racks, and a rack that is lost as a whole is replaced from other racks, in one migration."""

from __future__ import annotations

import os
import signal
from collections import Counter

from e2e_lab import Lab, Oracle, wait_for
from test_training_goes_on import assert_exact

RACKS = {"node0": "a", "node1": "a", "node2": "b", "node3": "b", "node4": "b", "node5": "c", "node6": "c"}


def test_a_rack_is_lost(lab: Lab, oracle: Oracle) -> None:
    racks = lab.folder / "racks.txt"
    racks.write_text("".join(f"{host} rack={rack}\n" for host, rack in RACKS.items()))
    lab.launch("--local-nodes", "7", "--nnodes", "4", "--standby", "3", "--label-file", str(racks), TEST_PACE_S="1.0")
    before = {n["name"]: n for n in lab.wait_warm(3)["nodes"]}
    assert {RACKS[name] for name, n in before.items() if n["role"] == "standby"} == {"a", "b", "c"}, "spares are not spread"
    active = [name for name, n in before.items() if n["role"] == "active"]
    ((lost, count),) = Counter(RACKS[name] for name in active).most_common(1)
    assert count == 2, active
    agents = lab.agents()
    for name in (name for name in agents if RACKS[name] == lost):
        os.kill(agents[name], signal.SIGKILL)
    moved = sorted(rank for name in active if RACKS[name] == lost for rank in before[name]["ranks"])
    row = wait_for("the rack's ranks have moved", lambda: next((r for r in lab.history() if sorted(r["ranks"]) == moved), None))
    assert row["cause"] == "failure"
    after = {n["name"]: n for n in lab.status()["nodes"]}
    joiners = {name for name, n in after.items() if set(n["ranks"]) & set(moved)}
    assert len(joiners) == 2
    assert lost not in {RACKS[name] for name in joiners}, (row, RACKS)
    for name in set(active) - {n for n in active if RACKS[n] == lost}:
        assert after[name]["pids"] == before[name]["pids"], f"{name} was restarted"
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=4)
