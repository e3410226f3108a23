"""What a worker leaves behind when it ends, and which of many ends was the cause."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from tmrun_agent import autopsy
from tmrun_agent import logs as module
from tmrun_agent.logs import Follower, Logs, Pump, WorkerOutput, split
from tmrun_agent.master import MasterStore
from torch.distributed import TCPStore

from tmrun import procs
from tmrun.cli import failed
from tmrun.core.failure import is_echo, root_cause, unanswered
from tmrun.core.model import Cause, End, Failure, Host, Incarnation, JobState, Kind, Move, RankMap, Seat
from tmrun.core.policy import cause_of
from tmrun.core.streams import Output, Streams, prefix


def failure(rank: int, at: float, *, code: int = 1, echo: bool = False, epoch: int = 1, **more: object) -> Failure:
    return Failure(Host(f"n{rank}"), rank, rank, 0, 100 + rank, code, at, epoch, echo=echo, **more)  # type: ignore[arg-type]


def test_the_cause_is_the_first_that_is_no_echo() -> None:
    echo, cause, late = failure(0, 5.0, echo=True), failure(1, 6.0), failure(2, 7.0)
    assert root_cause([late, echo, cause]) is cause
    assert root_cause([echo, failure(2, 6.0, echo=True)]) is echo


def test_what_was_healed_ended_nothing() -> None:
    """A failure counts until its slot is given away: by a migration, to whomever, or by a restart of all."""

    def seat(host: str) -> Seat:
        return Seat(Host(host), Incarnation(host))

    four = tuple(seat(f"n{i}") for i in range(4))
    maps = [
        RankMap(1, Kind.INITIAL, four, 1),
        RankMap(2, Kind.FAILURE, four, 1, moves=(Move(3, seat("n3"), seat("s")),)),
        RankMap(3, Kind.FAILURE, four, 1),  # went on in place
    ]
    healed, still, now = failure(3, 1.0, epoch=1), failure(2, 1.5, epoch=2), failure(0, 2.0, epoch=3)
    assert unanswered([healed, still, now], maps) == [still, now]
    assert unanswered([failure(3, 3.0, epoch=2), failure(3, 4.0, epoch=3)], maps) == [failure(3, 3.0, epoch=2), failure(3, 4.0, epoch=3)]
    assert unanswered([healed, now, last := failure(1, 9.0, epoch=4)], [*maps, RankMap(4, Kind.RESTART, four, 4)]) == [last]


def test_echoes() -> None:
    assert is_echo(1, "RuntimeError: [../gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.1]:1", ())
    assert is_echo(1, "", ("Traceback", "DistBackendError: NCCL error: remote process exited or there was a network error"))
    assert not is_echo(1, "ValueError: mine", ("Connection closed by peer, said a log line long before",))
    assert not is_echo(137, "", ("Connection reset by peer",))
    aborted = (
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what(): Watchdog caught collective operation timeout",
    )
    assert is_echo(134, "", aborted)
    assert not is_echo(139, "", aborted)


LOST = {"message": {"message": "RuntimeError: Rank 1 failed to pass monitoredBarrier\n Original exception: \nConnection closed by peer\n"}}
WRAPPED = {
    "message": {"message": "TrainError: step 5", "extraInfo": {"py_callstack": "RuntimeError: Connection closed by peer\n\nThe above ..."}}
}


@pytest.mark.parametrize("error", [LOST, WRAPPED, None], ids=["several lines", "raised from it", "only on stderr"])
def test_all_that_a_worker_said_tells_an_echo(tmp_path: Path, error: dict[str, object] | None) -> None:
    """As scripts leave it: an exception of several lines, one raised from another, or caught, printed and `sys.exit(1)`."""
    ours = logs(tmp_path, Output(only=(7,)) if error else Output("/dev/null", only=(7,)))
    (output,) = ours.open(0, [""])
    says = "echo 'RuntimeError: Connection closed by peer' >&2; echo 'stopping' >&2; exit 1"
    child = subprocess.Popen(["sh", "-c", "exit 1" if error else says], stderr=output.stderr)
    output.started()
    if error:
        Path(output.error_file).write_text(json.dumps(error))
    death = autopsy.examine(child.pid, 0, child.wait(), "", output, None)
    ours.close()
    assert autopsy.exited(death, -1).echo
    assert autopsy.failure(death, Host("n"), 0, 0, 1).echo
    assert "\n" not in death.summary


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"message": {"message": "x", "extraInfo": "text"}}', "x"),
        ('{"message": {"message": "x", "extraInfo": ["text"]}}', "x"),
        ('{"message": ' + "[" * 100_000, ""),
        ('["message"]', ""),
    ],
    ids=["text", "a list", "endless", "another shape"],
)
def test_an_error_file_of_a_scripts_own_is_read_as_far_as_it_goes(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "error.json").write_text(text)
    assert autopsy.read_error(str(tmp_path / "error.json"))[:2] == (message, "")


def test_the_report_names_everything() -> None:
    words = failed.report(
        "train.py",
        [
            failure(7, 2.0, code=137, signal="SIGKILL", hint="out of memory", tail=("last words",), log="/logs/0"),
            failure(1, 3.0, message="RuntimeError: Connection closed by peer\nmore of it", echo=True),
        ],
        2,
    )
    for text in (
        "train.py FAILED, after 2 restarts",
        "n7",
        "rank      : 7 (local_rank: 0)",
        "137 (pid: 107) SIGKILL",
        "out of memory",
        "last words",
        "/logs/0",
    ):
        assert text in words
    assert "more of it" not in words, "others are told in a line each"
    several = failed.report("train.py", [failure(7, 2.0, message="ValueError: two\n  lines")], 0)
    assert "  error     : ValueError: two\n      lines\n" in several
    assert words.index("Root cause") < words.index("n7") < words.index("Other failures (1)") < words.index("n1 rank 1")


def test_the_error_file_of_the_launcher_is_torchruns(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    end = End(JobState.FAILED, 137, "n1 rank 1: hangs")
    mine = "ValueError: mine\nand more of it"
    failed.leave_error_file([failure(1, 3.0, code=42, message=mine, traceback="Traceback\n  mine")], end, str(path))
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == (mine, 42)
    assert message["extraInfo"] == {"py_callstack": "Traceback\n  mine", "timestamp": "3"}
    assert autopsy.read_error(str(path)) == (mine, "Traceback\n  mine", path.stat().st_mtime)
    failed.leave_error_file([], end, str(path))
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("n1 rank 1: hangs", 137)
    path.write_text('{"message": 3')
    assert autopsy.read_error(str(path)) == ("", "", 0.0)


@pytest.mark.parametrize("version", [1, 2])
def test_kills_for_memory_are_counted(tmp_path: Path, version: int) -> None:
    membership = tmp_path / "cgroup"
    folder = tmp_path / ("job" if version == 2 else "memory/job")
    folder.mkdir(parents=True)
    membership.write_text("0::/job\n" if version == 2 else "4:cpu:/x\n3:memory:/job\n")
    events = folder / ("memory.events" if version == 2 else "memory.oom_control")
    events.write_text("oom 2\noom_kill 2\n")
    assert autopsy.oom_kills(tmp_path, membership) == 2
    assert "says this host's cgroup" in autopsy.memory_hint(137, 1)
    assert "somebody sent it" in autopsy.memory_hint(137, 0)
    assert "dmesg" in autopsy.memory_hint(137, None)
    assert autopsy.memory_hint(1, 1) == ""
    assert autopsy.oom_kills(tmp_path, tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("before", "after", "why", "counts", "hint"),
    [
        (2, 3, "", True, "out of memory, says this host's cgroup"),
        (2, 2, "", False, "somebody sent it"),
        (None, None, "", False, "perhaps out of memory"),
        (2, 3, "its timer ran out", False, ""),
    ],
)
def test_a_kill_is_for_memory_only_when_the_kernel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None, why: str, counts: bool, hint: str
) -> None:
    """A real process and SIGKILL; what the cgroup has counted is given."""
    monkeypatch.setattr(autopsy, "oom_kills", lambda: after)
    ours = logs(tmp_path, Output())
    (output,) = ours.open(0, [""])
    child = subprocess.Popen(["sleep", "600"])
    output.started()
    child.kill()
    death = autopsy.examine(child.pid, 0, child.wait(), why, output, before)
    ours.close()
    fact = autopsy.exited(death, 7)
    assert (fact.pid, fact.code, fact.step, fact.out_of_memory) == (child.pid, 137, 7, counts)
    assert (hint in death.hint) if hint else not death.hint
    assert cause_of(fact.code, out_of_memory=fact.out_of_memory) is (Cause.MEMORY if counts else Cause.KILLED)


# -- logs ---------------------------------------------------------------------------------------------------------------------------
def write(output: WorkerOutput, out: str = "", err: str = "") -> None:
    """As a worker would, and end."""
    for descriptor, text in ((output.stdout, out), (output.stderr, err)):
        if descriptor is not None:
            os.write(descriptor, text.encode())
    output.started()


def logs(tmp_path: Path, wanted: Output) -> Logs:
    return Logs(wanted, "job", "node1", tmp_path / "scratch", lambda _: None, lambda _: None)


def test_files_have_torchruns_layout_and_are_never_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = Output(str(tmp_path / "logs"), Streams(by_rank={1: 3}), Streams(by_rank={0: 1}), copies_out=("keep",))
    ours = logs(tmp_path, wanted)
    first, second = ours.open(0, [prefix("", "default", i, i, "n") for i in range(2)])
    write(first, "one keep\ntwo\nhalf", "to the console")
    write(second, "quiet\n", "error\n")
    assert second.tail() == ("error",)
    assert first.tail() == ("to the console",)
    Path(first.error_file).write_text("{}")
    again, _ = ours.open(0, ["[x]:", ""])
    write(again, "three\n")
    ours.close()
    (run,) = (tmp_path / "logs").iterdir()
    assert run.name.startswith("job_node1_")
    files = {str(p.relative_to(run)): p.read_text() for p in run.rglob("*") if p.is_file()}
    assert files == {
        "attempt_0/0/stdout.log": "one keep\ntwo\nhalfthree\n",
        "attempt_0/0/error.json": "{}",
        "attempt_0/1/stdout.log": "quiet\n",
        "attempt_0/1/stderr.log": "error\n",
        "attempt_0/filtered_stdout.log": "[default0]:one keep\n",
    }
    assert again.error_file == str(run / "attempt_0/0/error.2.json")
    assert capfd.readouterr().out == "[default0]:one keep\n[default0]:two\n[default0]:half\n[x]:three\n"


def test_without_files_and_with_a_filter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours = logs(tmp_path, Output("/dev/null", only=(1,)))
    hidden, shown = ours.open(0, ["", ""])
    assert (hidden.error_file, hidden.folder, shown.stdout) == ("", "", None)
    write(hidden, "not seen", "the failing tail")
    write(shown, err="seen\n")
    assert hidden.tail() == ("the failing tail",)
    assert shown.tail() == ("seen",)
    ours.close()
    assert capfd.readouterr() == ("", "seen\n")


class _Slow(threading.Event):
    """Its threads are overtaken at the worst moment."""

    def clear(self) -> None:
        time.sleep(0.05)
        super().clear()


def test_the_last_words_are_never_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pipe and what is kept of it nothing may look finished."""
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Event", _Slow)
        pump = Pump(None)
    os.write(pump.write_end, b"last words\n")
    os.close(pump.write_end)
    assert pump.tail() == ("last words",)
    pump.finish()


def test_a_folder_that_cannot_be_written_costs_the_logs_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file")
    told: list[str] = []
    moved: list[str] = []
    ours = Logs(Output(str(tmp_path / "logs" / "deep"), tee=Streams(3)), "job", "node1", tmp_path, told.append, moved.append)
    (output,) = ours.open(0, ["[x]:"])
    write(output, err="seen\n")
    ours.close()
    assert moved == []
    assert (output.stdout, output.error_file) == (None, "")
    assert "node1: no logs can be written" in told[0]
    assert capfd.readouterr().err == "seen\n"


def opened() -> set[str]:
    """The files and pipes that this process has open."""
    return {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize(
    "wanted", [Output("logs", tee=Streams(3), copies_out=("x",)), Output("/dev/null", only=(7,))], ids=["tee", "hidden"]
)
@pytest.mark.parametrize("last", [False, True])
def test_outputs_that_cannot_be_made_leave_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Output, last: bool
) -> None:
    """Nor a thread, for which each later attempt would wait."""
    monkeypatch.chdir(tmp_path)
    before, start = opened(), threading.Thread.start
    begun = count()

    def poor(thread: threading.Thread) -> None:
        if next(begun) == (0 if not last else 1 if wanted.only else 3):
            raise RuntimeError("can't start new thread")
        start(thread)

    ours = logs(tmp_path, wanted)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", poor)
        with pytest.raises(RuntimeError):
            ours.open(0, ["", ""])
    began = time.monotonic()
    ours.close(2.0)
    assert time.monotonic() - began < 2.0
    assert opened() <= before


def test_a_log_that_cannot_be_opened_leaves_nothing_of_the_others_open(tmp_path: Path) -> None:
    before = opened()
    ours = logs(tmp_path, Output(str(tmp_path / "logs"), tee=Streams(3)))
    ours._run = tmp_path / "run"
    (tmp_path / "run" / "attempt_0" / "1" / "stderr.log").mkdir(parents=True)
    for output in ours.open(0, ["", ""]):
        output.started()
    ours.close()
    assert opened() <= before


def test_the_prefix_has_a_template(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = prefix("${time} [${node}/${rank}.${local_rank} ${role_name}] ", "trainer", 1, 5, "node1")
    ours = logs(tmp_path, Output(str(tmp_path), tee=Streams(2)))
    (output,) = ours.open(0, [text])
    write(output, err="words\n")
    ours.close()
    clock, rest = capfd.readouterr().err.split(" ", 1)
    assert time.strptime(clock, "%H:%M:%S")
    assert rest == "[node1/5.1 trainer] words\n"


@pytest.mark.parametrize(
    ("text", "lines", "rest"),
    [
        ("a\nb", ["a"], "b"),
        ("a\r\n\nb\n", ["a", "", "b"], ""),
        ("\rbar 1\rbar 2", ["bar 1"], "bar 2"),
        ("\rbar 1\rbar 2\n", ["bar 1", "bar 2"], ""),
        ("half\r", [], "half\r"),
    ],
)
def test_what_a_line_is(text: str, lines: list[str], rest: str) -> None:
    assert split(text.encode()) == ([line.encode() for line in lines], rest.encode())


def test_a_progress_bar_is_seen_while_it_moves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours = logs(tmp_path, Output(str(tmp_path), tee=Streams(2)))
    (output,) = ours.open(0, ["[0]:"])
    assert output.stderr is not None
    seen = ""
    for said, shown in ((b"\r 1%\r 2%", "[0]: 1%\n"), (b"", "[0]: 1%\n[0]: 2%\n"), (b"\r 3%\r\n", "[0]: 1%\n[0]: 2%\n[0]: 3%\n")):
        os.write(output.stderr, said)
        end = time.monotonic() + 30
        while not seen.startswith(shown):
            assert time.monotonic() < end, seen
            time.sleep(0.02)
            seen += capfd.readouterr().err
    output.started()
    ours.close()
    assert capfd.readouterr().err == ""


def test_a_console_that_takes_nothing_holds_up_no_restart(tmp_path: Path) -> None:
    """As after Ctrl-S; what is left is copied once it takes something again."""
    (tmp_path / "log").touch()
    read_end, write_end = os.pipe()
    follower = Follower(tmp_path / "log", write_end, "", None)
    text = b"a line\n" * 100_000
    (tmp_path / "log").write_bytes(text)
    follower.finish(0.2)
    taken = b""
    while len(taken) < len(text):
        taken += os.read(read_end, 1 << 16)
    assert taken == text
    follower.finish()
    os.close(read_end)
    os.close(write_end)


def test_a_console_that_takes_nothing_holds_up_a_group_once_and_loses_none_of_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent does nothing else meanwhile; what was said before a restart is there at the end."""
    taken, shown = threading.Event(), list[bytes]()

    def console(_: int, data: bytes) -> None:
        assert taken.wait(60)
        shown.append(data)

    monkeypatch.setattr(module, "write_all", console)
    monkeypatch.setattr(module, "_DRAIN_S", 1.0)
    ours = logs(tmp_path, Output(str(tmp_path / "logs"), tee=Streams(3)))
    for i, output in enumerate(ours.open(0, [""] * 4)):
        write(output, f"out {i}\n", f"err {i}\n")
    began = time.monotonic()
    for attempt in (1, 2):
        for output in ours.open(attempt, [""] * 4):
            output.started()
    assert time.monotonic() - began < 4.0
    threading.Timer(0.5, taken.set).start()
    ours.close()
    assert sorted(shown) == sorted(f"{stream} {i}\n".encode() for stream in ("out", "err") for i in range(4))


def test_pipes_that_others_hold_are_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRAIN_S", 1.0)
    ours = logs(tmp_path, Output("/dev/null", only=(7,)))
    held = []
    for output in ours.open(0, [""] * 4):
        assert output.stderr is not None
        held.append(os.dup(output.stderr))
        output.started()
    began = time.monotonic()
    ours.close()
    assert time.monotonic() - began < 3.0
    for descriptor in held:
        os.close(descriptor)
    ours.close()
    assert ours._late == []


# -- the store behind MASTER_PORT ---------------------------------------------------------------------------------------------------
def silent(_: str) -> None:
    pytest.fail("there is nothing to tell")


def test_a_port_that_is_taken_is_no_obstacle() -> None:
    """But whoever has written the number into a script has to hear of it, if this host serves the store."""
    told: list[str] = []
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        store = MasterStore("127.0.0.1", taken, told.append)
        (other,) = store.ports
        assert other != taken
        assert told == []
        for start in (1, 2):
            store.open(other, start)
        store.close()
    assert told == [f"--master-port {taken} cannot be had at 127.0.0.1 (is it taken?): MASTER_PORT is {other}"]
    wished = MasterStore("127.0.0.1", taken, silent)
    assert wished.ports == (taken,)
    wished.open(taken, 1)
    wished.close()


def test_a_port_that_another_job_holds_is_no_obstacle_either() -> None:
    """Its workers may not run yet; both have the one that they say."""
    told: list[str] = []
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        wished = found.getsockname()[1]
    first, second = MasterStore("127.0.0.1", wished, silent), MasterStore("127.0.0.1", wished, told.append)
    try:
        assert first.ports == (wished,)
        second.open(second.ports[0], 1)
        first.open(wished, 1)
        assert told == [f"--master-port {wished} cannot be had at 127.0.0.1 (is it taken?): MASTER_PORT is {second.ports[0]}"]
    finally:
        first.close()
        second.close()


def event_descriptors() -> int:
    """How many this process has."""
    return sum(os.path.realpath(entry).endswith("[eventfd]") for entry in Path("/proc/self/fd").iterdir())


def test_a_store_that_could_not_be_opened_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while no thread can be had: what was before has been given back once, and nothing passes for open."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = MasterStore("127.0.0.1", 0, silent)
    port = store.ports[0]
    try:
        store.open(port, 1)
        before = event_descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    store.open(port, 2)
        assert event_descriptors() == before - 1, "the last one's, which has ended"
        store.open(port, 2)
        assert event_descriptors() == before
    finally:
        store.close()


def test_a_restart_finds_an_empty_store() -> None:
    """A real TCPStore; what the last attempt wrote is gone, even on a port that had to stay the same. One that is killed is told."""
    fixed = MasterStore("127.0.0.1", 0, silent)
    port = fixed.ports[0]
    fixed.close()
    told: queue.Queue[str] = queue.Queue()
    store = MasterStore("127.0.0.1", port, told.put)
    try:
        store.open(port, 1)
        assert _client(port).add("arrived", 1) == 1
        assert _client(port).add("arrived", 1) == 2
        store.open(port, 1)
        assert _client(port).add("arrived", 1) == 3
        store.open(port, 2)
        assert _client(port).add("arrived", 1) == 1
        assert told.empty()
        (server,) = [pid for pid in procs.children() if b"tmrun_agent.tcp_store" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(server, signal.SIGKILL)
        assert f"MASTER_PORT, 127.0.0.1:{port}) was killed by SIGKILL; whatever needs it from now on fails" in told.get(timeout=60)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            assert client.recv(1) == b"", "nobody waits for an answer that never comes"
        store.open(port, 3)
        assert _client(port).add("arrived", 1) == 1
    finally:
        store.close()


def _client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=100))
