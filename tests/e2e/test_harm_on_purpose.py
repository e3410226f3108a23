"""``tmrun chaos`` on a real job: a worker is killed, the node that took over falls silent; what was said would happen happens, exactly."""

from __future__ import annotations

import re

from e2e_lab import Lab, Oracle, wait_for
from test_training_goes_on import LOCAL, assert_exact

TTL_S = 4


def test_two_faults_on_purpose(lab: Lab, oracle: Oracle) -> None:
    lab.launch(*LOCAL, "--lease-ttl", str(TTL_S), TEST_PACE_S="1.5")
    before = lab.wait_warm()
    (stayer, first) = (n for n in before["nodes"] if n["ranks"])
    asked = lab.cli("chaos", "kill", first["name"])
    assert asked.returncode == 2 and "a warm standby takes ranks 2-3 over. Do it? not asked" in asked.stderr, asked
    killed = lab.cli("chaos", "kill", first["name"], "--rank", "3", "-y")
    assert killed.returncode == 0, killed
    assert f"SIGKILL to worker 1 of {first['name']} (pid {first['pids'][1]})" in killed.stdout
    assert re.search(rf"{first['name']} rank 3: .*SIGKILL", killed.stdout) and re.search(r"epoch 2: step \d+ ran; paused", killed.stdout)

    second = next(n for n in lab.wait_warm()["nodes"] if n["ranks"] and n["name"] != stayer["name"])
    silent = lab.cli("chaos", "partition", second["name"], "--for", f"{4 * TTL_S}s", "-y")
    assert silent.returncode == 0, silent
    assert f"{second['name']} is cut off for {4 * TTL_S} s" in silent.stdout and "epoch 3: step" in silent.stdout
    wait_for("its workers are ended", lambda: not lab.living(second["pids"]))
    back = wait_for("it is back", lambda: (n := lab.node(second["name"])).get("role") == "standby" and n)
    assert back["state"] in ("warming", "standby")

    assert [(r["cause"], r["leaver"]) for r in lab.history()[1:]] == [("failure", first["name"]), ("failure", second["name"])]
    assert lab.node(stayer["name"])["pids"] == stayer["pids"], "who stays is never restarted"
    told = lab.cli("events", "--kind", "chaos").stdout.splitlines()
    assert [line.split("chaos: ")[1].split(",")[0] for line in told] == [
        f"kill rank 3 of {first['name']}",
        f"cut {second['name']} off for {4 * TTL_S} s",
    ]
    assert lab.finish() == 0
    assert_exact(lab, oracle)
