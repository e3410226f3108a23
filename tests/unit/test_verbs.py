"""Every verb against a job in the model of the store: what it prints, its JSON, its exit code, what it writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tmrun.cli import jobs, main
from tmrun.core import transactions
from tmrun.core.codec import encode
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import (
    End,
    Event,
    Head,
    Host,
    Incarnation,
    JobState,
    Kind,
    Leader,
    Machine,
    Member,
    Move,
    Operation,
    OpState,
    Progress,
    RankMap,
    Resume,
    Run,
    Seat,
    Spec,
    Term,
    Timing,
    Verb,
)
from tmrun.store.memory import Fate, MemoryStore, MemoryWorld

KEYS = Keys("train")
ACTIVE = tuple(f"node{i}" for i in range(4))
STANDBY = ("node10", "node11")


def seat(host: str) -> Seat:
    return Seat(Host(host), Incarnation(f"{host}.1"))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A job of 4 active nodes with 2 ranks each and 2 warm standbys, which has drained node9 before."""
    client = MemoryWorld().client()
    records: dict[str, object] = {
        KEYS.spec: Spec(4, 2, 2, ("train.py",)), KEYS.term: Term(1), KEYS.leader: Leader(Host("node0"), seat("node0").incarnation, 1),
        KEYS.head: Head(2, 0, 1), KEYS.map(1): RankMap(1, Kind.INITIAL, tuple(map(seat, (*ACTIVE[:3], "node9"))), 1),
        KEYS.map(2): RankMap(2, Kind.DRAIN, tuple(map(seat, ACTIVE)), 1, 1, (Move(3, seat("node9"), seat("node3")),), Resume(50), "ECC"),
        KEYS.event("node0.1", 1): Event(1000.0, Host("node0"), "epoch 1: node0 ranks 0-1"),
        KEYS.event("node1.1", 1): Event(1002.0, Host("node1"), "node10 is a warm standby", "standby_changed"),
    }  # fmt: skip
    for host in (*ACTIVE, *STANDBY):
        labels = {"rack": "r1"} if host in ACTIVE else {}
        member = Member(Host(host), seat(host).incarnation, f"10.0.0.{host[4:]}", 1, "1", warm=host in STANDBY, labels=labels)
        records[KEYS.member(host)] = member
        records[KEYS.progress(host)] = Progress(Host(host), 60, 0.1, time.time(), epoch=2)
    for slot, host in enumerate(ACTIVE):
        records[KEYS.run(slot)] = Run(slot, Host(host), seat(host).incarnation, 2, (11, 12), True)
    for rank in range(6):
        records[KEYS.timing(2, rank)] = Timing(rank, "stayer", {"wait": 0.2, "switch": 0.1}, redo_s=0.05, pause_s=0.9, resumed=True)
    records[KEYS.timing(2, 6)] = Timing(6, "joiner", {"bind": 0.1, "state": 0.6}, bytes=3_000_000)
    for key, record in records.items():
        client.put(key, encode(record))

    @contextmanager
    def connect(job: str | None, etcd: str | None, deadline_s: float = 5.0) -> Iterator[jobs.Connection]:
        yield jobs.Connection(client, KEYS)

    monkeypatch.setattr(jobs, "connect", connect)
    return client


def job(store: MemoryStore) -> Job:
    return jobs.Connection(store, KEYS).read()


class Answer:
    """What one command printed and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        self.code = main.run(list(arguments))
        self.out, self.err = capsys.readouterr()

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def tmrun(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: Answer(capsys, *arguments)


# -- looking
def test_status_is_one_screen(tmrun: Any) -> None:
    told = tmrun("status")
    assert told.code == 0
    assert "train  running" in told.out and "epoch 2  step 60 (0.10 s a step)  standby 2/2 warm  coordinator node0" in told.out
    assert "last: epoch 2 drain node9 -> node3 (ranks 6-7), paused 0.90 s" in told.out
    assert "rack=r1" in told.out and "healthy" in told.out
    assert "10.0.0.1 " in tmrun("status", "-o", "wide").out


@pytest.mark.parametrize("verb", [("status",), ("nodes",), ("history",), ("plan", "node0"), ("ok-to-drain", "node0")], ids=lambda v: v[0])
def test_json_and_yaml_say_the_same_and_carry_an_api_version(tmrun: Any, verb: tuple[str, ...]) -> None:
    value = tmrun(*verb, "-o", "json").json()
    assert value["api_version"] == 1 and value["job"] == "train"
    told = yaml.safe_load(tmrun(*verb, "-o", "yaml").out)
    for row in (*value.get("nodes", ()), *told.get("nodes", ())):
        if isinstance(row, dict):
            row["step_age_s"] = 0
    assert told == value


def test_nodes_can_be_filtered_and_named(tmrun: Any) -> None:
    assert tmrun("nodes", "-o", "name").out.split() == [*ACTIVE, *STANDBY]
    assert tmrun("nodes", "-o", "name", "--state", "standby").out.split() == [*STANDBY]
    assert tmrun("nodes", "-R", "-o", "name").out == ""
    tmrun("cordon", "node10", "--reason", "noisy neighbour")
    told = tmrun("nodes", "-R")
    assert "standby,cordoned" in told.out and "noisy neighbour" in told.out


def test_in_a_pipe_nothing_is_wrapped(tmrun: Any) -> None:
    why = " ".join(["because"] * 60)
    tmrun("cordon", "node10", "--reason", why)
    lines = tmrun("nodes").out.splitlines()
    assert len(lines) == 1 + len(ACTIVE) + len(STANDBY) and any(line.endswith(why) for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_events_in_the_order_of_time(tmrun: Any) -> None:
    lines = tmrun("events").out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["node0: epoch 1: node0 ranks 0-1", "node1: node10 is a warm standby"]
    (line,) = tmrun("events", "-o", "json", "-n", "1").out.splitlines()
    assert json.loads(line) == {
        "api_version": 1, "time": 1002.0, "node": "node1", "kind": "standby_changed", "text": "node10 is a warm standby",
    }  # fmt: skip
    assert len(tmrun("events", "--kind", "standby_changed").out.splitlines()) == 1


def test_events_follow_until_the_job_ends(tmrun: Any, store: MemoryStore) -> None:
    store.put(KEYS.end, encode(End(JobState.SUCCEEDED, 0, "done")))
    assert len(tmrun("events", "-f").out.splitlines()) == 2, "the watch lists them again, nobody wants to read them again"


def test_trace_lays_the_workers_phases_side_by_side(tmrun: Any, tmp_path: Any) -> None:
    value = tmrun("trace", "2").json()
    spans = [e for e in value["traceEvents"] if e["ph"] == "X"]
    names = {(e["tid"], e["name"]): e for e in spans}
    redo = {rank: names[rank, "redo"]["ts"] for rank in range(6)}
    assert set(map(round, redo.values())) == {700_000}, "all go on at the same moment"
    assert round(names[6, "state"]["ts"] + names[6, "state"]["dur"]) == 700_000
    assert names[6, "state"]["args"]["bytes"] == 3_000_000
    path = tmp_path / "spans.jsonl"
    assert "spans of 7 workers written" in tmrun("trace", "2", "--form", "jsonl", "--to", str(path)).err
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["node"] for line in lines} == set(ACTIVE) and len(lines) == len(spans)
    assert (tmrun("trace", "1").code, tmrun("trace", "9").code) == (7, 7)


# -- foreseeing
def test_plan_is_what_the_coordinator_would_do(tmrun: Any, store: MemoryStore) -> None:
    told = tmrun("plan", "node[1-2]")
    assert told.code == 0
    assert "slot 1 (ranks 2-3) node1 -> node10; state from node1" in told.out and "node2 -> node11" in told.out
    assert "expected pause: 0.90 s to 0.90 s" in told.out
    assert job(store).open_ops() == [], "nothing is changed"


def test_a_plan_says_how_near_the_joiner_is(tmrun: Any, store: MemoryStore) -> None:
    spare = Member(Host("node10"), seat("node10").incarnation, "10.0.0.10", 1, "1", warm=True, labels={"rack": "r1", "block": "b7"})
    store.put(KEYS.member("node10"), encode(replace(spare, labels={"rack": "r1"})))
    assert "node1 -> node10 (same rack); state from node1" in tmrun("plan", "node1", "--to", "node10").out
    store.put(KEYS.member("node10"), encode(spare))
    assert tmrun("plan", "node1", "--to", "node10", "-o", "json").json()["moves"][0]["near"] is None, "r1 of another block"


def test_what_stands_in_the_way_is_named(tmrun: Any) -> None:
    for verb in ("plan", "ok-to-drain"):
        told = tmrun(verb, "node[0-2]")
        assert told.code == 3 and "2 warm standbys for 3 leaving" in told.err
    tmrun("cordon", "node10")
    told = tmrun("ok_to_drain", "node[0-1]", "-o", "json")
    assert (told.code, told.json()["ok"]) == (3, False)
    assert told.json()["blockers"] == ["1 warm standby for 2 leaving (node10 cordoned)"]
    assert tmrun("ok-to-drain", "node0").out == "ok: node0 can be drained\n"
    assert "node0 is no warm, free standby" in tmrun("plan", "node1", "--to", "node0").err


# -- changing
def test_cordon_keeps_ranks_and_is_taken_back(tmrun: Any, store: MemoryStore) -> None:
    assert tmrun("cordon", "node0,node10", "--reason", "x").out.splitlines() == [
        "node0 cordoned  (reason: 'x')", "node10 cordoned  (reason: 'x')",
    ]  # fmt: skip
    assert tmrun("status", "-o", "json").json()["standby"]["warm"] == 1
    assert "STANDBY_LOW" in tmrun("status").out
    tmrun("uncordon", "node0", "node10")
    assert job(store).admins == {}


def test_checks_name_a_stuck_drain_and_mixed_versions(tmrun: Any, store: MemoryStore) -> None:
    tmrun("drain", "node0", "--detach")
    tmrun("cordon", *STANDBY)
    assert "DRAIN_STUCK: drain d-" in tmrun("status").out
    store.put(KEYS.member("node1"), encode(Member(Host("node1"), seat("node1").incarnation, "a", 1, "2")))
    (skew,) = [c for c in tmrun("status", "-o", "json").json()["checks"] if c["code"] == "VERSION_SKEW"]
    assert "2: node1" in skew["text"]


def test_a_script_that_never_calls_run_steps_is_not_waited_for_in_silence(tmrun: Any, store: MemoryStore) -> None:
    for slot, run in job(store).runs.items():
        store.put(KEYS.run(slot), encode(replace(run.value, joined=False)))
    assert tmrun("drain", "node0", "--detach").out.splitlines()[1].endswith("cannot be moved, only restarted: `tmrun replace node0`")
    assert "waits for the workers to reach run.steps" in tmrun("status").out


def test_a_cordon_survives_a_drain_and_its_end(tmrun: Any, store: MemoryStore) -> None:
    tmrun("cordon", "node0")
    tmrun("drain", "node0", "--detach")
    assert "op d-" in tmrun("drain", "node0", "--detach").out
    (op,) = job(store).open_ops()
    assert tmrun("drain", "--cancel", op.id[:4]).out == f"drain {op.id} of node0 cancelled\n"
    assert [(a.draining, a.cordoned) for a in job(store).admins.values()] == [(False, True)]


def test_drain_says_what_it_does_and_does_it_once(tmrun: Any, store: MemoryStore) -> None:
    assert "state from node1" in tmrun("drain", "node1", "--dry_run").out
    assert job(store).open_ops() == []
    first = tmrun("drain", "node1", "--reason", "ECC", "--detach")
    (op,) = job(store).open_ops()
    assert first.out == f"node1 cordoned  (op {op.id}, reason: 'ECC')\n"
    assert tmrun("drain", "node1", "--detach").out == f"already draining (op {op.id}, reason: 'ECC')\n"
    late = tmrun("drain", "node1", "--deadline", "100ms")
    assert late.code == 4 and f"op {op.id} goes on" in late.err
    refused = tmrun("drain", "node[0-3]", "--detach")
    assert refused.code == 3
    assert "open request" in tmrun("status").out


def test_a_drain_by_force_needs_a_deadline_and_a_yes(tmrun: Any, store: MemoryStore) -> None:
    assert (tmrun("drain", "node1", "--on-deadline", "force").code, job(store).open_ops()) == (2, [])
    asked = tmrun("drain", "node1", "--on-deadline", "force", "--deadline", "10m")
    assert asked.code == 2 and "give -y" in asked.err
    tmrun("drain", "node1", "--on-deadline", "force", "--deadline", "10m", "--detach", "-y")
    (op,) = job(store).open_ops()
    assert (op.verb, op.force_after_s) == ("drain", 600.0)


def test_pause_and_resume(tmrun: Any, store: MemoryStore) -> None:
    assert "automatic replacement is paused (reason: 'debugging')" in tmrun("pause", "--reason", "debugging").out
    assert "is paused already" in tmrun("pause").out
    status = tmrun("status")
    assert "train  paused" in status.out and "AUTOMATION PAUSED" in status.out and "PAUSED" in status.out
    refused = tmrun("replace", "node1", "-y")
    assert (refused.code, "`tmrun resume` first" in refused.err) == (3, True)
    assert "goes on" in tmrun("resume").out and job(store).pause is None
    assert "is not paused" in tmrun("resume").out


def test_replace_asks_about_a_node_that_answers(tmrun: Any, store: MemoryStore) -> None:
    asked = tmrun("replace", "node1")
    assert asked.code == 2 and "still answering: node1;" in asked.err and "give -y" in asked.err
    assert "it would end its workers" in tmrun("replace", "node1", "--dry-run").out
    tmrun("replace", "node1", "-y", "--detach")
    (op,) = job(store).open_ops()
    assert (op.verb, op.hosts) == ("replace", ("node1",))


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 3)])
def test_a_question_on_a_terminal(tmrun: Any, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, answer: bool, code: int) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda question, **_: asked.append(question) or answer)
    told = tmrun("replace", "node1", "--detach")
    assert (told.code, len(asked), len(job(store).open_ops())) == (code, 1, 1 if answer else 0)
    assert answer or told.err == "tmrun: nothing was changed\n"


def test_replace_confirms_the_death_of_a_silent_node(tmrun: Any, store: MemoryStore) -> None:
    from tmrun.core.txn import Delete, Txn

    store.commit(Txn((), (Delete(KEYS.member("node1")),), "gone"))
    assert tmrun("replace", "node1").code == 2
    assert "node1 is confirmed dead" in tmrun("replace", "node1", "-y").out
    assert job(store).obituaries[Host("node1")].incarnation == "node1.1"


def test_undrain_brings_a_drained_node_back(tmrun: Any, store: MemoryStore) -> None:
    assert tmrun("undrain", "node10").code == 3
    op = Operation("d-1", Verb.DRAIN, (Host("node10"),), "x")
    store.commit(transactions.request(job(store), op))
    busy = tmrun("undrain", "node10")
    assert busy.code == 3 and "drain d-1 is still going on" in busy.err
    store.put(KEYS.op("d-1"), encode(Operation("d-1", Verb.DRAIN, (Host("node10"),), "x", state=OpState.DONE)))
    assert tmrun("undrain", "node10").out == "node10 is a standby again\n"


def test_an_answer_that_got_lost_is_said_to_be_unknown(tmrun: Any, store: MemoryStore) -> None:
    store.next_commits(Fate.APPLIED_UNANSWERED)
    told = tmrun("cordon", "node0")
    assert told.code == 5 and "it may have been applied" in told.err and told.err.count("\n") == 1


def test_nothing_is_asked_of_a_job_that_has_ended(tmrun: Any, store: MemoryStore) -> None:
    tmrun("stop")
    for verb in (("drain", "node1"), ("cordon", "node1"), ("pause",), ("resume",), ("replace", "node1", "-y"), ("stop",)):
        told = tmrun(*verb)
        assert told.code == 1 and told.err.startswith("tmrun: job train has ended"), verb


# -- names, flags, help
def test_names_may_be_short_if_they_are_clear(tmrun: Any) -> None:
    assert tmrun("ok-to-drain", "node1").code == 0, "an exact name wins over longer ones"
    unclear = tmrun("ok-to-drain", "nod")
    assert unclear.code == 2 and "'nod' could be node0, node1" in unclear.err
    missing = tmrun("drain", "node[7-8]")
    assert missing.code == 7 and "no node 'node7' in job train; nodes: node0, node1" in missing.err
    assert tmrun("drain", "node[7-").code == 2


@pytest.mark.parametrize("text", ["", "-1", "0", "5 weeks", "x"])
def test_a_bad_duration_is_refused_in_one_line(tmrun: Any, text: str) -> None:
    told = tmrun("drain", "node1", f"--deadline={text}")
    assert told.code == 2 and told.err.count("\n") == 1 and "is no duration" in told.err


@pytest.mark.parametrize("verb", list(main._VERBS))
def test_every_verb_explains_itself(tmrun: Any, verb: str) -> None:
    told = tmrun(verb, "--help")
    assert told.code == 0 and "Usage: tmrun " in told.out
    command = main.cli.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None and command.short_help
    flags = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    assert all(getattr(p, "help", None) for p in flags), "every flag has a help text"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_verbs_and_nodes(store: MemoryStore, shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "_TMRUN_COMPLETE" in Answer(capsys, "completion", shell).out
    for typed in ("tmrun drain node1", "tmrun chaos kill node1"):
        at = "node1" if shell == "fish" else str(len(typed.split()) - 1)
        words = {"COMP_WORDS": typed, "COMP_CWORD": at, "_TMRUN_COMPLETE": f"{shell}_complete"}
        told = CliRunner().invoke(main.cli, [], prog_name="tmrun", env=words)
        assert "node1" in told.output and "node10" in told.output and "node2" not in told.output


def test_what_top_reads_once_is_what_history_says(store: MemoryStore) -> None:
    from tmrun.cli import read

    connection, past, story = jobs.Connection(store, KEYS), read.Past(jobs.Connection(store, KEYS)), read.Story()
    assert past.rows(2, 2) == read.read_history(connection, job(store))
    watch = store.watch(KEYS.events, story.feed)
    store.put(KEYS.event("node0.1", 2), encode(Event(1001.0, Host("node0"), "between")))
    assert [e["text"] for e in story.events()] == ["epoch 1: node0 ranks 0-1", "between", "node10 is a warm standby"]
    assert story.events() == read.read_events(connection)
    watch.close()


def test_gpus_are_told_as_in_use_of_there(tmrun: Any, store: MemoryStore) -> None:
    def gpus(node: str) -> str:
        lines = tmrun("nodes").out.splitlines()
        at = lines[0].index("GPUS")
        return str(next(line[at : at + 4].strip() for line in lines if line.startswith(f"{node} ")))

    assert {gpus(node) for node in (*ACTIVE, *STANDBY)} == {"-"}, "a job on CPUs, or before its workers have told"
    gpu = Machine("NVIDIA H100", gpus=8, gpus_used=("GPU-1", "GPU-2"))
    store.put(KEYS.run(1), encode(Run(1, Host("node1"), seat("node1").incarnation, 2, (11, 12), True, gpu)))
    store.put(KEYS.run(2), encode(Run(2, Host("node2"), seat("node2").incarnation, 2, (11, 12), True, Machine("cpu"))))
    spare = Member(Host("node10"), seat("node10").incarnation, "10.0.0.10", 1, "1", warm=True, machine=replace(gpu, gpus_used=()))
    store.put(KEYS.member("node10"), encode(spare))
    assert (gpus("node1"), gpus("node2"), gpus("node10")) == ("2/8", "-", "0/8")
    assert "GPUs 2/16 in use" in tmrun("status").out
    value = tmrun("status", "-o", "json").json()
    assert value["gpus"] == {"total": 16, "used": 2}
    assert {n["name"]: n["gpus"] for n in value["nodes"]} == {
        "node0": None, "node1": {"total": 8, "used": 2}, "node2": {"total": 0, "used": 0}, "node3": None,
        "node10": {"total": 8, "used": 0}, "node11": None,
    }  # fmt: skip
