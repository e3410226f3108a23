"""One job, everything an operator does to it and sees of it; and what of its secret anybody else can see."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

from e2e_lab import DEADLINE_S, Lab, wait_for

from tmrun import procs

SECRET = "5ecret-of-this-test-0123456789abcdef"


def test_an_operators_night(lab: Lab, tmp_path: Path) -> None:
    hook = tmp_path / "hook.jsonl"
    flags = ("--local-nodes", "4", "--nnodes", "2", "--standby", "2", "--job", "night", "--metrics", "0")
    lab.launch(*flags, "--on-event", f"sh -c 'cat >> {hook}; echo >> {hook}'", steps=5000, TMRUN_SECRET=SECRET)
    epoch = lab.wait_warm(2)["epoch"]

    # what can be connected to, and what can be read by others
    assert _exposed(lab) == [], "everything listens on loopback"
    leaks = [line for line in _command_lines(lab) if SECRET in line]
    assert leaks == []
    assert [pid for pid in _workers(lab) if SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes()] == [], "workers do not have it"
    metrics = re.findall(r"(node\d): metrics on (http://127\.0\.0\.1:\d+/metrics)", lab.output())
    assert len(metrics) == 4
    text = "".join(_get(url) for _, url in metrics)
    assert 'tmrun_job_standbys_warm{job="night"' in text and text.count("tmrun_step{") == 4

    # a plan, and what stands in its way
    assert lab.cli("ok-to-drain", "node[0-3]").returncode == 3
    value = _json(lab, "nodes", "-o", "json", "--state", "active")
    first, second = (n["name"] for n in value["nodes"])
    (move,) = _json(lab, "plan", first, "-o", "json")["moves"]
    assert (move["leaver"], move["source"]) == (first, first)

    # a cordoned standby is passed over; the drain takes the other one
    assert lab.cli("cordon", move["joiner"], "--reason", "noisy").returncode == 0
    (other,) = _json(lab, "plan", first, "-o", "json")["moves"]
    assert other["joiner"] != move["joiner"]
    told = lab.cli("drain", first, "--reason", "ECC")
    assert told.returncode == 0, told.stderr
    expected = (
        "cordoned  (op d-",
        "plan: slot 0",
        "prepared: 3/3 votes, stop at step",
        f"committed epoch {epoch + 1}",
        "paused",
        "safe to power off",
    )
    assert [e for e in expected if e not in told.stdout] == [], told.stdout

    # a pause holds a replacement back, and says so everywhere
    assert lab.cli("pause", "--reason", "looking").returncode == 0
    os.kill(lab.node(second)["pids"][0], signal.SIGKILL)
    held = wait_for("the failure is held back", lambda: (s := lab.status())["state"] == "paused" and "SIGKILL" in s["reason"] and s)
    assert held["epoch"] == epoch + 1 and {c["code"] for c in held["checks"]} >= {"PAUSED"}
    assert _sees_top(lab, ("AUTOMATION PAUSED", f"{second} failed"))
    assert lab.cli("uncordon", move["joiner"]).returncode == 0
    assert lab.cli("resume").returncode == 0
    wait_for("the replacement", lambda: lab.status()["epoch"] == epoch + 2 and lab.status()["state"] == "running")

    # a node is replaced because a person says so
    lab.cli("undrain", first)
    lab.wait_warm(2)
    seated = next(n["name"] for n in lab.status()["nodes"] if n["role"] == "active")
    told = lab.cli("replace", seated, "-y", "--reason", "smells")
    assert told.returncode == 0 and f"{seated} replaced (safe to power off)" in told.stdout, told
    assert lab.node(seated)["state"] == "drained"

    # afterwards
    trace = _json(lab, "trace", str(epoch + 3))
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"} >= {"wait", "state", "redo"}
    rehearsed = next(n["name"] for n in lab.status()["nodes"] if n["state"] in ("standby", "warming"))
    said = lab.cli("logs", rehearsed)
    assert said.returncode == 0 and (f"[{rehearsed} rehearsal 0]" in said.stdout or "nothing is in the files of" in said.stderr), said
    pauses = "".join(_get(url) for _, url in metrics)
    assert 'tmrun_pauses_total{cause="drain"' in pauses and 'tmrun_pauses_total{cause="failure"' in pauses
    assert lab.cli("stop", "-y").returncode == 0
    assert lab.launches[0].wait(DEADLINE_S) == 143
    assert re.search(r"tmrun: job night stopped after .*, step \d+: 3 migrations, [\d.]+ s paused in all", lab.output())
    events = [json.loads(line) for line in hook.read_text().splitlines() if line]
    kinds = [e["kind"] for e in events]
    assert kinds.count("migration_committed") == 3 and kinds.count("request_finished") == 2, "each event is told once"
    assert SECRET not in lab.output() + hook.read_text()


def _json(lab: Lab, *arguments: str) -> Any:
    told = lab.cli(*arguments)
    assert told.returncode == 0, told
    return json.loads(told.stdout)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def _ours(lab: Lab) -> list[int]:
    return procs.marked(lab.marker, "TEST_LAB")


def _workers(lab: Lab) -> list[int]:
    found = [pid for n in lab.status()["nodes"] for pid in n["pids"]]
    assert len(found) == 2
    return found


def _command_lines(lab: Lab) -> list[str]:
    found = []
    for pid in _ours(lab):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    assert len(found) > 6
    return found


def _exposed(lab: Lab) -> list[str]:
    """Listening TCP sockets of the job's control plane (launcher, etcd, agents) that another machine could connect to.

    Workers are left out: gloo's own listeners are on the interface that the ranks use, with or without tmrun.
    """
    inodes: dict[str, str] = {}
    for pid in _ours(lab):
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "tmrun.worker.bootstrap" in argv:
                continue
            inodes |= {str(fd.readlink()): argv for fd in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    found, seen = [], 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            owner = inodes.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and owner is not None:
                seen += 1
                address = fields[1].split(":")[0]
                if address not in ("0100007F", "00000000000000000000000001000000"):
                    found.append(f"{address}: {owner}")
    assert seen >= 6, "etcd (clients, peers) and four metrics ports"
    return found


def _sees_top(lab: Lab, wanted: tuple[str, ...]) -> bool:
    """``tmrun top`` on a terminal of its own shows all of this; ``q`` ends it with 0."""
    main, sub = pty.openpty()
    env = {**lab.environment(TERM="xterm-256color", COLUMNS="120", LINES="40"), "NO_COLOR": ""}
    top = subprocess.Popen([sys.executable, "-m", "tmrun", "top"], stdin=sub, stdout=sub, stderr=sub, env=env, start_new_session=True)
    os.close(sub)
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(main, 65536):
                shown.append(data)
        except OSError:
            pass  # the other end is closed

    reader = threading.Thread(target=read)
    reader.start()

    def text() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(shown).decode(errors="replace"))

    try:
        wait_for(f"top shows {wanted}", lambda: all(w in text() for w in wanted), 60)
        os.write(main, b"q")
        return top.wait(30) == 0
    finally:
        if top.poll() is None:
            top.kill()
            top.wait()
        reader.join(10)
        os.close(main)
