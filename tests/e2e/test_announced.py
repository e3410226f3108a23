"""A cloud's metadata service, Kubernetes' API (its HTTP edge is a stand-in) and a file announce that machines go; the job stays exact."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, Lab, Oracle, wait_for
from test_leaving import moved
from test_training_goes_on import assert_exact

from tmrun.store.embedded import EmbeddedEtcd

HOSTS = ("cloud", "pod", "plain", "last")


class Web:
    """Paths and what they answer; anything else is 404."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        answers = self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = answers.get(self.path)
                self.send_response(404 if text is None else 200)
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def web() -> Iterator[Web]:
    found = Web()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def kubernetes(*, tainted: bool) -> str:
    taints = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}] if tainted else []
    return json.dumps({"kind": "Node", "spec": {"taints": taints}})


def test_machines_are_taken_away_with_and_without_a_standby(
    lab: Lab, oracle: Oracle, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two drains onto standbys; a third one has none, so its ranks are given up at its deadline and the others wait until a machine stays
    after all."""
    maintenance = tmp_path / "maintenance"
    web.answers["/api/v1/nodes/worker-7"] = kubernetes(tainted=False)
    sources = {
        "cloud": ("--notice-url", f"{web.url}/spot"),
        "pod": ("--kubernetes-node", f"worker-7@{web.url}"),
        "plain": ("--notice-file", str(maintenance), "--notice-deadline", "2"),
    }
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--standby", "2", "--max-restarts", "0")
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        monkeypatch.setenv("TMRUN_ETCD", etcd.url)
        monkeypatch.setenv("TMRUN_JOB", "announced")
        for number, host in enumerate(HOSTS):
            lab.launch(*flags, "--node-name", host, "--node-rank", str(number), *sources.get(host, ()))
        lab.wait_warm(2)
        web.answers["/spot"] = '{"action": "terminate", "time": "2026-09-18T08:22:00Z"}'
        moved(lab, "cloud", '"action": "terminate"')
        web.answers["/api/v1/nodes/worker-7"] = kubernetes(tainted=True)
        moved(lab, "pod", "Kubernetes taint ToBeDeletedByClusterAutoscaler:NoSchedule")
        wait_for("both are drained", lambda: {lab.node(h)["state"] for h in ("cloud", "pod")} == {"drained"})
        before = lab.trains(lab.trains()["step"] + 3)
        maintenance.write_text("rack power")
        wait_for("nobody is there to take over", lambda: lab.status().get("state") == "waiting_for_nodes")
        wait_for("its workers ended", lambda: not lab.living(next(n["pids"] for n in before["nodes"] if n["name"] == "plain")))
        assert lab.node("last")["pids"] == next(n["pids"] for n in before["nodes"] if n["name"] == "last"), "who stays keeps its state"
        del web.answers["/spot"]
        wait_for("it trains again", lambda: lab.node("cloud")["ranks"] and lab.status()["state"] == "running")
        assert lab.node("last")["pids"] == next(n["pids"] for n in before["nodes"] if n["name"] == "last"), "the stayers were restarted"
        lab.go_fast()
        assert [launch.wait(DEADLINE_S) for launch in lab.launches] == [0, 0, 0, 0]
    assert_exact(lab, oracle, 0, 1, 2, 3, may_miss=2)
