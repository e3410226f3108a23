"""Metrics, hooks, the launcher's live line: what others are told of a job."""

from __future__ import annotations

import io
import json
import queue
import socket
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.text import Text
from test_core import KEYS, running, seat
from test_views import MIGRATION, ROW, job
from tmrun_agent.metrics import Metrics

from tmrun.cli import slurm
from tmrun.cli.hooks import Hooks, Wanted
from tmrun.cli.run import metrics_address
from tmrun.core import ledger as books
from tmrun.core import transactions
from tmrun.core.errors import UsageError
from tmrun.core.ledger import Ledger
from tmrun.core.model import Admin, Copies, Host, Kind, Leader, Pause, Term, Timing
from tmrun.core.story import EventKind, kind_of
from tmrun.core.txn import Txn
from tmrun.tui import launch_view
from tmrun.tui.footer import Footer

ME = Host("a")
LED = ((KEYS.leader, Leader(ME, seat("a").incarnation, 1)), (KEYS.term, Term(1)))


# -- the ledger
def stayer(rank: int, pause_s: float, **phases: float) -> Timing:
    return Timing(rank, "stayer", phases, redo_s=0.1, pause_s=pause_s, resumed=True)


def test_pauses_are_counted_by_cause_and_phase_and_told_again_replace_what_was_said() -> None:
    ledger = books.timing(Ledger(), 2, Kind.DRAIN, Timing(0, "stayer", {"wait": 0.5}))
    assert books.pauses(ledger) == {}, "not over yet"
    ledger = books.timing(ledger, 2, Kind.DRAIN, stayer(0, 0.6, wait=0.5))
    ledger = books.timing(ledger, 2, Kind.DRAIN, stayer(1, 0.7, wait=0.5))
    ledger = books.timing(ledger, 3, Kind.FAILURE, stayer(0, 2.0, detect=1.0, wait=0.5))
    assert books.pauses(ledger) == {"drain": (1, 0.7), "failure": (1, 2.0)}
    assert books.phases(ledger)["failure", "detect"] == 1.0


def test_a_ledger_is_bounded_and_forgets_no_sum() -> None:
    ledger = Ledger()
    for epoch in range(2, 2 + 2 * books.MAX_EPOCHS):
        ledger = books.timing(ledger, epoch, Kind.DRAIN, stayer(0, 1.0, wait=0.5))
    assert len(ledger.accounts) == books.MAX_EPOCHS
    assert books.pauses(ledger) == {"drain": (2 * books.MAX_EPOCHS, 2.0 * books.MAX_EPOCHS)}
    assert books.phases(ledger)["drain", "bind"] == pytest.approx(books.MAX_EPOCHS)


def value(families: list[books.Family], name: str, **labels: str) -> float:
    return next(v for f in families if f.name == name for lab, v in f.samples if dict(lab) == labels)


def test_goodput_is_the_time_that_pauses_left() -> None:
    ledger = books.progress(Ledger(), 3, 0.5, 100.0)
    ledger = books.timing(books.progress(ledger, 9, 0.5, 150.0), 2, Kind.DRAIN, stayer(0, 10.0, wait=9.0))
    found = books.of_node(ledger, running(), ME, 200.0, store_answers=True)
    assert value(found, "tmrun_goodput_ratio") == pytest.approx(0.9)
    assert value(found, "tmrun_step") == 9
    assert value(found, "tmrun_node_state", state="active") == 1
    assert value(found, "tmrun_standby_ready") == 0


def test_a_cordoned_standby_is_not_ready() -> None:
    more = (KEYS.admin("s"), Admin(Host("s"), cordoned=True))
    assert value(books.of_node(Ledger(), running(), Host("s"), 1.0, store_answers=True), "tmrun_standby_ready") == 1
    assert value(books.of_node(Ledger(), running(more), Host("s"), 1.0, store_answers=True), "tmrun_standby_ready") == 0
    assert value(books.of_job(running(more, *LED), 0.0), "tmrun_job_standbys_warm") == 0


def test_what_copies_cost_is_told_once_and_when_they_come_twice_or_half_as_often() -> None:
    copies = Copies(3, 25_000_000, 0.007, 0.04)
    assert copies.text == "25.0 MB a rank go to a partner's memory every 3 steps; training waits 7.0 ms for each, sending takes 40 ms"
    cases = {(0, 1): True, (4, 7): False, (4, 8): True, (4, 3): False, (4, 2): True}
    assert {(told, every): replace(copies, every=every).is_news(told) for told, every in cases} == cases


def test_of_several_workers_copies_the_dearest_is_exported() -> None:
    assert not [f for f in books.of_node(Ledger(), running(), ME, 1.0, store_answers=True) if "copy" in f.name]
    ledger = books.copied(Ledger(), 0, Copies(3, 10, 0.5, 2.0))
    ledger = books.copied(books.copied(ledger, 1, Copies(9, 9, 9.0, 9.0)), 1, Copies(4, 20, 0.25, 1.0))
    found = books.of_node(ledger, running(), ME, 1.0, store_answers=True)
    names = ("tmrun_copy_interval_steps", "tmrun_copy_bytes", "tmrun_copy_seconds", "tmrun_copy_send_seconds")
    assert [value(found, name) for name in names] == [4, 20, 0.5, 2.0]


# -- metrics
@pytest.fixture
def metrics() -> Iterator[Metrics]:
    found = Metrics("train", ME)
    yield found
    found.close()


def scrape(text: str) -> dict[str, Any]:
    url = text.removeprefix("metrics on ")
    with urllib.request.urlopen(url, timeout=5) as answer:
        return {f.name: f for f in text_string_to_metric_families(answer.read().decode())}


def test_metrics_are_served_on_loopback_and_parse(metrics: Metrics) -> None:
    told = metrics.serve("127.0.0.1:0")
    assert list(scrape(told)) == ["tmrun_info"], "before the job is known"
    metrics.progress(7, 0.25)
    metrics.timing(2, Kind.FAILURE, stayer(0, 1.5, wait=1.0))
    metrics.seen(running(*LED, (KEYS.pause, Pause("x"))), store_answers=True)
    found = scrape(told)
    (pause,) = found["tmrun_pause_seconds"].samples
    assert (pause.name, pause.value) == ("tmrun_pause_seconds_total", 1.5)
    assert pause.labels == {"job": "train", "node": "a", "cause": "failure"}
    assert found["tmrun_job_paused"].samples[0].value == 1
    metrics.seen(running(), store_answers=True)
    assert "tmrun_job_paused" not in scrape(told), "only the coordinator speaks of the job"


def test_a_port_that_is_taken_costs_no_job(metrics: Metrics) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        told = metrics.serve(f"127.0.0.1:{holder.getsockname()[1]}")
    assert told.startswith("no metrics: cannot listen on 127.0.0.1:") and "choose another --metrics port" in told


@pytest.mark.parametrize(
    ("text", "where"), [("9400", ("127.0.0.1", 9400)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:9", ("[::1]", 9)), (None, None)]
)
def test_metrics_listen_on_loopback_unless_told(text: str | None, where: tuple[str, int] | None) -> None:
    assert metrics_address(text) == where


def test_a_bad_metrics_address_is_refused() -> None:
    for text in ("x", "host:", "host:99999999"):
        with pytest.raises(UsageError, match="--metrics"):
            metrics_address(text)


# -- hooks
class _Receiver(BaseHTTPRequestHandler):
    got: queue.SimpleQueue[Any]

    def do_POST(self) -> None:
        self.got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.path.startswith("/rubbish"):
            self.wfile.write(b"nonsense\r\n\r\n")
            return
        self.send_response(500 if self.path.startswith("/broken") else 204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, queue.SimpleQueue[Any]]]:
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()
    server = HTTPServer(("127.0.0.1", 0), type("R", (_Receiver,), {"got": got}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()
    thread.join()


EVENT = {"api_version": 1, "job": "train", "time": 1.0, "node": "node1", "kind": "note", "text": "hello"}


def test_a_hook_gets_the_event_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMRUN_SECRET", "s3cret-value")
    out, said = tmp_path / "out", list[str]()
    hooks = Hooks(Wanted(f"sh -c 'cat >> {out}; env >> {out}'"), said.append)
    hooks.tell(EVENT)
    hooks.close()
    text = out.read_text()
    assert json.loads(text[: text.index("}") + 1]) == EVENT
    assert "PATH=" in text and "s3cret-value" not in text and said == []


def test_a_webhook_gets_a_post(receiver: tuple[str, queue.SimpleQueue[Any]]) -> None:
    url, got = receiver
    hooks = Hooks(Wanted(url=url), print)
    hooks.tell(EVENT)
    hooks.close()
    assert got.get(timeout=1) == EVENT


def test_hooks_that_fail_are_told_once_and_do_not_stop_the_others(receiver: tuple[str, queue.SimpleQueue[Any]]) -> None:
    url, _ = receiver
    for wanted, complaint in (
        (Wanted("false"), "event hook ended with exit code 1"),
        (Wanted("/no/such/program"), "event hook cannot be run: No such file or directory"),
        (Wanted(url=f"{url}/broken?token=abc"), "event webhook at 127.0.0.1 answered 500"),
        (Wanted(url="http://127.0.0.1:1/?token=abc"), "event webhook at 127.0.0.1 does not answer: "),
        (Wanted(url=f"{url}/rubbish?token=abc"), "event webhook at 127.0.0.1 cannot be told: BadStatusLine"),
        (Wanted(url=f"{url}/a b?token=abc"), "event webhook at 127.0.0.1 cannot be told: InvalidURL"),
    ):
        said: list[str] = []
        hooks = Hooks(wanted, said.append)
        for _ in range(3):
            hooks.tell(EVENT)
        hooks.close()
        assert len(said) == 1 and said[0].startswith(complaint) and "abc" not in said[0]


@pytest.mark.parametrize("wanted", [Wanted("echo 'x"), Wanted(url="ftp://x"), Wanted(url="just-a-name")])
def test_bad_hooks_are_refused_without_repeating_a_token(wanted: Wanted) -> None:
    with pytest.raises(UsageError) as caught:
        wanted.check()
    assert wanted.url == "" or wanted.url not in str(caught.value)


# -- kinds of events
def test_what_is_worth_a_line_has_a_kind() -> None:
    current = running(*LED)
    assert kind_of(transactions.start(current, (seat("a"), seat("b")), Kind.RESTART, "x")) is EventKind.JOB_RESTARTED
    assert kind_of(transactions.propose(current, Kind.FAILURE, (), "", "x")) is EventKind.MIGRATION_PROPOSED
    assert kind_of(transactions.release(current, 0)) is EventKind.WORKERS_FAILED
    assert kind_of(transactions.update_member(current, current.members[ME].value, 1)) is EventKind.STANDBY_CHANGED
    assert kind_of(Txn((), (), "something else")) is EventKind.NOTE


# -- the live line
def test_the_live_line_says_what_is_waited_for() -> None:
    waiting = {**job(2), "state": "rendezvous", "reason": "waiting for nodes: 2 of 4 here", "nnodes": 4, "nproc": 8}
    waiting["standby"] = {"warm": 0, "warming": 0, "wanted": 1}
    assert "2/5 nodes  waiting for nodes" in launch_view.line(waiting, ["node0"])[0].plain
    line, gist = launch_view.line(job(8), ["node0"])
    assert "step 88231 (0.52 s a step)  epoch 11  standby 1/1 warm  node0 active" in line.plain
    assert "88231" not in gist, "a step alone is no news"
    moving, _ = launch_view.line({**job(8), "migration": MIGRATION}, ["node0", "node1"])
    state = {"name": "state", "state": "now", "done": 0, "total": 8, "bytes": None, "detail": ""}
    transfer = {**MIGRATION, "phases": [state], "transfers": [{"node": "node63", "done": 1_200_000_000, "total": 3_200_000_000}]}
    assert "0/8  1.2 GB of 3.2 GB" in launch_view.line({**job(8), "migration": transfer}, ["node0"])[0].plain
    assert "epoch 12: node7 -> node63  prepare" in moving.plain and "40/65  waiting for stayer node9" in moving.plain


def test_the_end_tells_what_the_migrations_cost() -> None:
    lines = launch_view.ending("train", "succeeded", [ROW, {**ROW, "epoch": 13, "pause_s": 1.05}], 1000, 3600)
    assert lines[-1] == "job train succeeded after 60 min, step 1000: 2 migrations, 2.00 s paused in all"
    assert launch_view.ending("train", "stopped", [], None, 5)[-1] == "job train stopped after 5.00 s: no migration"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_footer_keeps_the_last_line_for_itself_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    size = [(80, 24)]
    out = _Terminal()
    footer = Footer(out, lambda: size[0])
    footer.show(Text("step 1"))
    assert "\x1b[1;23r" in out.getvalue() and "\x1b[24;1H" in out.getvalue()
    size[0] = (100, 30)
    footer.show(Text("step 2"))
    assert "\x1b[1;29r" in out.getvalue()
    footer.say("an event")
    footer.close()
    assert out.getvalue().endswith("\x1b[K\x1b8\x1b[K") and "\x1b[r" in out.getvalue()


def test_without_a_terminal_the_line_is_printed_when_its_gist_changes_or_seldom() -> None:
    out, now = io.StringIO(), [0.0]
    footer = Footer(out, clock=lambda: now[0])
    for second in range(200):
        now[0] = 1000.0 + second
        footer.show(Text(f"step {second}"), "running")
    footer.show(Text("gone"), "waiting")
    assert out.getvalue().splitlines() == ["tmrun: step 0", "tmrun: step 60", "tmrun: step 120", "tmrun: step 180", "tmrun: gone"]


def test_slurm_tells_the_switches() -> None:
    told = {"SLURM_TOPOLOGY_ADDR": "s0.s5.node3", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert slurm.labels(told) == {"switch": "s5", "switch2": "s0"}
    assert slurm.labels({}) == {}
