"""Faults of the control plane under a real training: nothing that happens to etcd or to an agent may cost a worker that progresses."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time

import pytest
from e2e_lab import Lab, Oracle, wait_for
from test_training_goes_on import LOCAL, assert_exact, settled


def pids_of(status: dict[str, object]) -> list[int]:
    nodes: list[dict[str, list[int]]] = status["nodes"]  # type: ignore[assignment]
    return [pid for n in nodes for pid in n["pids"]]


def test_the_embedded_etcd_is_killed(lab: Lab, oracle: Oracle) -> None:
    """It is started again on its data; training does not notice, and a drain works afterwards."""
    lab.launch(*LOCAL)
    before = lab.wait_warm()
    (etcd,) = lab.etcds()
    os.kill(etcd, signal.SIGKILL)
    wait_for("a new etcd", lambda: [p for p in lab.etcds() if p != etcd])
    after = lab.trains(before["step"] + 5)
    assert (after["epoch"], pids_of(after)) == (1, pids_of(before))
    assert "the store ended (exit code 137) and was started again on its data" in lab.output()
    lab.wait_warm()
    assert lab.cli("drain", "node0").returncode == 0
    settled(lab, 2)
    assert lab.finish() == 0
    assert_exact(lab, oracle)


AWAY_S = 30


def test_the_store_is_away_for_ten_lease_times(lab: Lab, oracle: Oracle) -> None:
    """Steps go on without it. When the frozen etcd wakes up it expires all leases at once: agents register again as who they were, no
    worker dies."""
    lab.launch(*LOCAL, "--lease-ttl", "3")
    before = lab.wait_warm()
    (etcd,) = lab.etcds()
    os.kill(etcd, signal.SIGSTOP)
    seen = [min(len(steps) for steps in lab.read_losses().values())]
    for _ in range(3):
        time.sleep(AWAY_S / 3)
        seen.append(min(len(steps) for steps in lab.read_losses().values()))
    lost = lab.cli("status")
    assert lost.returncode == 6 and "STORE_LOST: " in lost.stdout, lost
    assert re.search(r"unknown \(the workers of this machine are in step \d+; all ranks lived \d+\.\d s ago\)", lost.stdout), lost
    os.kill(etcd, signal.SIGCONT)
    assert all(a + 3 < b for a, b in itertools.pairwise(seen)), f"steps done, every {AWAY_S / 3:.0f} s without a store: {seen}"
    after = lab.trains(before["step"] + 20)
    wait_for("all are registered again", lambda: [n["state"] for n in lab.status().get("nodes", ())] == ["active", "active", "standby"])
    assert after["step"] > before["step"]
    final = lab.status()
    assert pids_of(final) == pids_of(before), lab.output()
    told = lab.output()
    assert told.count("training goes on while its steps do") == told.count("the store answers again") == 1, told
    assert "watch on" not in told and "keep-alive" not in told, "retries are nobody's business"
    assert lab.finish() == 0
    assert_exact(lab, oracle)


def test_the_leader_of_three_etcds_is_killed(lab: Lab, oracle: Oracle) -> None:
    lab.launch(*LOCAL, "--etcd-members", "3")
    before = lab.wait_warm()
    for etcd in lab.etcds():  # one after the other: each was or becomes the leader at some time
        os.kill(etcd, signal.SIGKILL)
        wait_for("three etcds again", lambda gone=etcd: len([p for p in lab.etcds() if p != gone]) == 3)
        lab.trains(lab.trains()["step"] + 3)
    assert pids_of(lab.status()) == pids_of(before)
    assert lab.cli("drain", "node1").returncode == 0
    assert lab.finish() == 0
    assert_exact(lab, oracle)


def test_a_slow_store_is_told_until_it_is_quick_again(lab: Lab) -> None:
    """An etcd that runs for a tenth of the time: answers take long, nothing is lost."""
    lab.launch("--local-nodes", "1", "--nnodes", "1", "--nproc-per-node", "1", "--lease-ttl", "6")
    before = lab.trains()
    (etcd,) = lab.etcds()
    quick = threading.Event()

    def drag() -> None:
        while not quick.is_set():
            os.kill(etcd, signal.SIGSTOP)
            time.sleep(0.9)
            os.kill(etcd, signal.SIGCONT)
            time.sleep(0.1)

    def slow() -> list[str]:
        return [check["text"] for check in lab.status().get("checks", []) if check["code"] == "STORE_SLOW"]

    dragging = threading.Thread(target=drag)
    dragging.start()
    try:
        wait_for("it is told", lambda: any(re.search(r"answers take up to \d\.\d\d s at node0", text) for text in slow()))
        wait_for("a person is told", lambda: re.search("STORE_SLOW.*tmrun doctor", lab.cli("status").stdout))
    finally:
        quick.set()
        dragging.join()
    wait_for("it is quick again", lambda: lab.status() and slow() == [])
    assert (lab.status()["epoch"], pids_of(lab.status())) == (before["epoch"], pids_of(before))
    assert lab.finish() == 0


@pytest.mark.parametrize("who", ["coordinator", "active"])
def test_a_frozen_agent(lab: Lab, oracle: Oracle, who: str) -> None:
    """Its launcher ends it and its workers long before its lease runs out; its ranks move; it is a standby in its next life."""
    lab.launch(*LOCAL, "--lease-ttl", "4", TEST_PACE_S="1.5")  # it has to last until a second standby is warm
    before = lab.wait_warm()
    agents = lab.agents()
    victim = before["coordinator"] if who == "coordinator" else next(n["name"] for n in before["nodes"] if n["slot"] == 1)
    row = next(n for n in before["nodes"] if n["name"] == victim)
    os.kill(agents[victim], signal.SIGSTOP)
    wait_for("it is ended", lambda: f"agent {victim} is frozen" in lab.output())
    if row["slot"] is None:  # the standby coordinated: another agent takes over, nothing else changes
        wait_for("another coordinator", lambda: lab.status().get("coordinator") is not None)
        lab.wait_warm()
        assert lab.status()["epoch"] == 1
    else:
        settled(lab, 2)
        assert not lab.living(row["pids"]), "its workers live on"
    wait_for("it is a standby", lambda: lab.node(victim)["state"] == "standby")
    assert lab.agents()[victim] != agents[victim]
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=2)


def test_a_broken_link_between_living_nodes(lab: Lab, oracle: Oracle) -> None:
    """Nobody died, so nobody is replaced: everybody connects again in place and redoes the step."""
    cut = lab.folder / "cut"
    lab.launch(*LOCAL, "--lease-ttl", "4", TEST_CUT=str(cut))
    before = lab.wait_warm()
    cut.write_text("1")
    wait_for("connected again", lambda: lab.status().get("epoch") == 2 and lab.status()["state"] == "running")
    after = lab.trains(lab.trains()["step"] + 3)
    assert pids_of(after) == pids_of(before), "somebody was restarted"
    assert "nobody has died, connecting again in place" in lab.output()
    assert lab.finish() == 0
    assert_exact(lab, oracle)
