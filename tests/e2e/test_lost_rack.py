"""Failure domains: spares are spread over racks, and a rack that is lost as a whole is replaced from other racks, in one migration."""

from __future__ import annotations

import os
import signal
from collections import Counter

from e2e_lab import DEADLINE_S, Lab, Oracle, wait_for
from test_sharded import STEPS, hashes, start_torchrun
from test_training_goes_on import assert_exact

RACKS = {"node0": "a", "node1": "a", "node2": "b", "node3": "b", "node4": "b", "node5": "c", "node6": "c"}


def lose_a_rack(lab: Lab) -> None:
    """Once the spares are warm. Both of its slots move to other racks, in one migration."""
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
    for name in (name for name in active if RACKS[name] != lost):
        assert after[name]["pids"] == before[name]["pids"], f"{name} was restarted"


def labelled(lab: Lab) -> tuple[str, ...]:
    """Flags of a job of four nodes and three spares in three racks."""
    racks = lab.folder / "racks.txt"
    racks.write_text("".join(f"{host} rack={rack}\n" for host, rack in RACKS.items()))
    return ("--local-nodes", "7", "--nnodes", "4", "--standby", "3", "--label-file", str(racks))


def test_a_rack_is_lost(lab: Lab, oracle: Oracle) -> None:
    lab.launch(*labelled(lab), TEST_PACE_S="1.0")
    lose_a_rack(lab)
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=4)


def test_a_rack_of_shards_is_lost(lab: Lab) -> None:
    """No rank has a replica, and the copies of a rack's shards are in another one. How often they are taken, measured costs decide."""
    (lab.folder / "hashes").mkdir()
    pace = {"TEST_SCRIPT": "fsdp2.py", "TEST_HASHES": str(lab.folder / "hashes"), "OMP_NUM_THREADS": "1"}
    lab.launch(*labelled(lab), script_args=("--steps", str(STEPS)), TEST_PACE_S="1.0", **pace)
    with start_torchrun("fsdp2", lab.folder / "expected", 4) as reference:
        wait_for("copies", lambda: "MB a rank go to a partner's memory every" in lab.cli("events").stdout)
        lose_a_rack(lab)
        assert lab.finish() == 0
        assert reference.wait(DEADLINE_S) == 0
    assert hashes(lab.folder / "hashes") == hashes(lab.folder / "expected")
