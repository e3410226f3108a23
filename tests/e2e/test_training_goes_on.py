"""The promise: drain and kill move ranks, nobody else restarts, and every loss and the final parameters are bitwise those of torchrun."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from e2e_lab import STEPS, WORLD, Lab, Oracle, wait_for

LOCAL = ("--local-nodes", "3", "--nnodes", "2", "--nproc-per-node", "2", "--standby", "1")
ROW_FIELDS = {"epoch", "cause", "leaver", "joiner", "ranks", "detect_s", "bind_s", "comm_s", "state_s", "redo_s", "pause_s"}
STATUS_FIELDS = {"job", "state", "epoch", "step", "nodes"}
NODE_FIELDS = {"name", "state", "role", "slot", "ranks", "pids"}


def assert_exact(lab: Lab, oracle: Oracle, *launches: int, may_miss: int = 0) -> None:
    """``may_miss``: lines that a killed process had computed but not written."""
    assert lab.final_hash(*launches) == oracle.final_hash
    losses = lab.read_losses()
    missing = 0
    for rank in range(WORLD):
        assert losses[rank].items() <= oracle.losses[rank].items(), f"rank {rank}"
        missing += STEPS - len(losses[rank])
    assert missing <= may_miss, f"{missing} losses are missing"


def settled(lab: Lab, epoch: int) -> list[dict[str, Any]]:
    """Wait until the migration that made ``epoch`` is fully accounted for; the history."""

    def done() -> list[dict[str, Any]] | None:
        rows = lab.history()
        return rows if len(rows) == epoch and rows[-1]["pause_s"] is not None else None

    rows: list[dict[str, Any]] = wait_for(f"epoch {epoch}\n{lab.output()}", done)
    return rows


def test_drain(lab: Lab, oracle: Oracle) -> None:
    lab.launch(*LOCAL)
    before = lab.wait_warm()
    assert before.keys() >= STATUS_FIELDS
    assert all(n.keys() >= NODE_FIELDS for n in before["nodes"])
    assert [(n["name"], n["role"], n["ranks"]) for n in before["nodes"]] == [
        ("node0", "active", [0, 1]),
        ("node1", "active", [2, 3]),
        ("node2", "standby", []),
    ]
    drain = lab.cli("drain", "node1", "--reason", "ECC, ticket 8812")
    assert drain.returncode == 0, drain.stderr
    assert drain.stdout.splitlines()[0].startswith("node1 cordoned  (op d-")
    assert "plan: slot 1 (ranks 2-3) node1 -> node2 (warm)" in drain.stdout
    assert drain.stdout.splitlines()[-1] == "node1 drained (safe to power off)"

    rows = settled(lab, 2)
    assert rows[1].keys() >= ROW_FIELDS
    assert (rows[1]["cause"], rows[1]["leaver"], rows[1]["joiner"], rows[1]["ranks"]) == ("drain", "node1", "node2", [2, 3])
    assert rows[1]["redo_s"] == 0
    after = lab.status()
    assert [n["state"] for n in after["nodes"]] == ["active", "drained", "active"]
    assert after["nodes"][0]["pids"] == before["nodes"][0]["pids"], "the stayers were restarted"
    assert after["nodes"][1]["pids"] == []
    assert (after["nodes"][1]["reason"], after["nodes"][2]["ranks"]) == ("ECC, ticket 8812", [2, 3])

    again = lab.cli("drain", "node1")
    assert (again.returncode, again.stderr) == (3, "tmrun: node1 is drained already; `tmrun undrain node1` brings it back\n")
    assert lab.finish() == 0
    assert_exact(lab, oracle)


def test_kill_a_worker(lab: Lab, oracle: Oracle) -> None:
    lab.launch(*LOCAL)
    before = lab.wait_warm()
    victim, stayer = before["nodes"][:2]
    os.kill(victim["pids"][0], signal.SIGKILL)
    rows = settled(lab, 2)
    assert (rows[1]["cause"], rows[1]["leaver"], rows[1]["joiner"], rows[1]["ranks"]) == (
        "failure",
        victim["name"],
        "node2",
        victim["ranks"],
    )
    assert "node0 rank 0: killed by SIGKILL" in lab.output()
    assert lab.node(stayer["name"])["pids"] == stayer["pids"], "the stayers were restarted"
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=2)


def test_kill_an_agent_with_its_workers(lab: Lab, oracle: Oracle) -> None:
    """The machine is gone: SIGKILL of agent and workers, the coordinator first of all (it is as mortal as any)."""
    lab.launch(*LOCAL)
    before = lab.wait_warm()
    victim = before["coordinator"] if before["coordinator"] != "node2" else "node1"
    pids = lab.agents()
    row = next(n for n in before["nodes"] if n["name"] == victim)
    other = next(n for n in before["nodes"] if n["name"] not in (victim, "node2"))
    for pid in (pids[victim], *row["pids"]):
        os.kill(pid, signal.SIGKILL)
    rows = settled(lab, 2)
    assert (rows[1]["leaver"], rows[1]["joiner"], rows[1]["ranks"]) == (victim, "node2", row["ranks"])
    assert lab.node(other["name"])["pids"] == other["pids"], "the stayers were restarted"
    wait_for("its next life", lambda: lab.node(victim)["state"] in ("warming", "standby"))
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=2)


def test_kill_an_agent_only(lab: Lab, oracle: Oracle) -> None:
    """Its workers must not live on."""
    lab.launch(*LOCAL)
    before = lab.wait_warm()
    os.kill(lab.agents()["node1"], signal.SIGKILL)
    settled(lab, 2)
    gone = lambda: not any(Path(f"/proc/{p}").exists() for p in before["nodes"][1]["pids"])  # noqa: E731 - nor may zombies pile up
    wait_for("the workers of the dead agent are gone", gone, 10)
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=2)


def test_again_and_again(lab: Lab, oracle: Oracle) -> None:
    """Drain, undrain, a kill of what joined, and a segmentation fault; the machine that takes over then had failed before."""
    lab.launch(*LOCAL)
    lab.wait_warm()
    assert lab.cli("drain", "node0").returncode == 0
    assert lab.cli("undrain", "node0").returncode == 0
    lab.wait_warm()
    os.kill(lab.node("node2")["pids"][0], signal.SIGKILL)
    rows = settled(lab, 3)
    assert (rows[2]["leaver"], rows[2]["joiner"]) == ("node2", "node0")
    lab.wait_warm()  # node2 rehearses again
    stayers = lab.node("node0")["pids"]
    os.kill(lab.node("node1")["pids"][1], signal.SIGSEGV)
    rows = settled(lab, 4)
    assert (rows[3]["cause"], rows[3]["leaver"], rows[3]["joiner"], rows[3]["ranks"]) == ("failure", "node1", "node2", [2, 3])
    assert "node1 rank 3: killed by SIGSEGV" in lab.output()
    assert lab.node("node0")["pids"] == stayers, "the stayers were restarted"
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=4)


def test_no_standby_left(lab: Lab, oracle: Oracle) -> None:
    """The stayers wait with their state; the failed node itself comes back and takes its ranks."""
    lab.launch("--local-nodes", "2", "--nnodes", "2", "--nproc-per-node", "2")
    before = lab.trains()
    refused = lab.cli("drain", "node1")
    assert refused.returncode == 3
    assert "cannot drain node1: 0 standby nodes for 1 leaving" in refused.stderr
    os.kill(before["nodes"][1]["pids"][0], signal.SIGKILL)
    rows = settled(lab, 2)
    assert (rows[1]["cause"], rows[1]["leaver"], rows[1]["joiner"]) == ("failure", "node1", "node1")
    assert lab.node("node0")["pids"] == before["nodes"][0]["pids"], "the stayers were restarted"
    assert lab.finish() == 0
    assert_exact(lab, oracle, may_miss=2)
