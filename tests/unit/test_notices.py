"""Preemption notices: each source, real files, commands and HTTP servers; Kubernetes is a server that answers as its API does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tmrun_agent.notices import GoesAway, Notices, from_command, from_file, from_kubernetes, from_url


class Answers(BaseHTTPRequestHandler):
    """Answers what the test put into ``paths``: path -> (status, text)."""

    paths: dict[str, tuple[int, str]]
    asked: list[str | None]

    def do_GET(self) -> None:
        self.asked.append(self.headers.get("Authorization"))
        status, text = self.paths.get(self.path, (404, "no such thing"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Answers]]]:
    handler = type("Here", (Answers,), {"paths": {}, "asked": []})
    httpd = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", handler
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_file(tmp_path: Path) -> None:
    ask = from_file(tmp_path / "notice")
    assert ask() == ""
    (tmp_path / "notice").write_text("")
    assert ask() == "announced"
    (tmp_path / "notice").write_text("host maintenance\n at 12:00")
    assert ask() == "host maintenance at 12:00"


def test_a_command(tmp_path: Path) -> None:
    ask = from_command(f"cat {tmp_path}/notice")
    assert ask() == ""
    (tmp_path / "notice").write_text("spot reclaim")
    assert ask() == "spot reclaim"


def test_a_url(server: tuple[str, type[Answers]]) -> None:
    url, handler = server
    ask = from_url(f"{url}/spot/instance-action")
    assert ask() == ""
    handler.paths["/spot/instance-action"] = (200, '{"action": "terminate"}')
    assert ask() == '{"action": "terminate"}'
    handler.paths["/spot/instance-action"] = (500, "")
    with pytest.raises(OSError, match="500"):
        ask()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, ""),
        ({"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]}, "cordoned"),
        ({"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}, "taint ToBeDeletedByClusterAutoscaler"),
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "PreferNoSchedule"}]}, ""),
    ],
)
def test_kubernetes(server: tuple[str, type[Answers]], tmp_path: Path, spec: dict[str, object], reason: str) -> None:
    url, handler = server
    (tmp_path / "token").write_text("secret\n")
    handler.paths["/api/v1/nodes/worker-7"] = (200, json.dumps({"kind": "Node", "spec": spec}))
    said = from_kubernetes("worker-7", url, tmp_path)()
    assert (reason in said) if reason else said == ""
    assert handler.asked == ["Bearer secret"]


def test_a_change_is_told_once_and_can_be_taken_back(tmp_path: Path) -> None:
    file, told, heard = tmp_path / "notice", [], []  # type: ignore[var-annotated]
    notices = Notices([from_url("http://127.0.0.1:9/"), from_file(file)], heard.append, told.append)
    assert notices.ask() is None, "a source that fails knows nothing, neither good nor bad"
    file.write_text("away")
    assert notices.ask() == "away"
    assert len(told) == 1
    alone = Notices([from_file(file)], heard.append, told.append)
    alone.start()
    deadline = threading.Event()
    for _ in range(100):
        if heard == [GoesAway("away"), GoesAway("")]:
            break
        if heard:
            file.unlink(missing_ok=True)
        deadline.wait(0.1)
    assert heard == [GoesAway("away"), GoesAway("")]
