"""How a launch begins and ends: several launchers one job, bad input, signals, exit codes; nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, Lab, Oracle, free_port, wait_for
from test_training_goes_on import assert_exact, settled

from tmrun import procs, witness
from tmrun.store.embedded import EmbeddedEtcd


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that never calls tmrun: says that it runs, has a child in a session of its own, does as told."""
    path = tmp_path / "plain.py"
    path.write_text(
        "import os, subprocess, sys, time\n"
        "rank = os.environ['RANK']\n"
        "if rank == '0': subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('rank', rank, 'of', os.environ['WORLD_SIZE'], 'restart', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.stdout.write(f'given {sys.argv}\\n')\n"
        "if sys.argv[1] == 'exit' and rank == '1': sys.exit(42)\n"
        "if sys.argv[1] != 'done': time.sleep(600)\n"
    )
    return path


@pytest.mark.parametrize("how", ["rdzv-endpoint", "etcd"])
def test_one_launcher_a_host(lab: Lab, oracle: Oracle, how: str, tmp_path: Path) -> None:
    """The same command on each host forms one job; a node dies: its launcher, or everything at once, so that nobody there can tell."""
    common = ("--nnodes", "2", "--nproc-per-node", "2", "--standby", "1", "--lease-ttl", "60", "--job", "several")
    if how == "etcd":
        with EmbeddedEtcd(tmp_path / "etcd") as etcd:
            _several(lab, oracle, (*common, "--etcd", etcd.url), witness.Proof.CLOSED)
    else:
        _several(lab, oracle, (*common, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"), witness.Proof.WORD)


def _several(lab: Lab, oracle: Oracle, flags: tuple[str, ...], proof: witness.Proof) -> None:
    names = ["alpha", "beta", "gamma"]
    for name in names:
        lab.launch(*flags, "--node-name", name)
    where = flags[-1].replace("http://", "")
    before = lab.wait_warm(1, "--etcd", where, "--job", "several")
    assert {n["role"] for n in before["nodes"]} == {"active", "standby"}
    essential = [n for i, n in enumerate(names) if "this host runs the store" in lab.output(i)]
    assert len(essential) == (1 if "--rdzv-endpoint" in flags else 0)
    victim = next(n["name"] for n in before["nodes"] if n["role"] == "active" and n["name"] not in essential)
    launcher = lab.launches[names.index(victim)].pid
    for pid in (launcher, *(below(launcher) if proof is witness.Proof.CLOSED else ())):
        os.kill(pid, signal.SIGKILL)
    lab.history = lambda: _history(lab, where)  # type: ignore[method-assign]
    rows = settled(lab, 2)
    assert (rows[1]["cause"], rows[1]["leaver"]) == ("failure", victim)
    assert any(f"{victim} is gone: {proof.value}" in lab.output(i) for i in range(len(names)))
    lab.go_fast()
    codes = [launch.wait(DEADLINE_S) for launch in lab.launches]
    assert sorted(codes) == [-9, 0, 0]
    if proof is witness.Proof.CLOSED:
        assert lab.leftovers(), "nobody was left to remove its folder"
        lab.cli("--nnodes", "1", "--no-python", "true")  # the next launch does it
    assert_exact(lab, oracle, 0, 1, 2, may_miss=2)


def below(pid: int) -> list[int]:
    """Everything that this process started, and these in turn; stopped, so that nobody sees another one end."""
    os.kill(pid, signal.SIGSTOP)
    return [found for child in procs.children(pid) for found in (child, *below(child))]


def _history(lab: Lab, where: str) -> list[dict[str, object]]:
    import json

    answer = lab.cli("history", "-o", "json", "--etcd", where, "--job", "several")
    rows: list[dict[str, object]] = json.loads(answer.stdout)["history"] if answer.returncode == 0 else []
    return rows


def test_exit_code_of_the_first_failure(lab: Lab, script: Path) -> None:
    lab.launch("--local-nodes", "2", script=script, script_args=("exit",))
    assert lab.launches[0].wait(DEADLINE_S) == 42
    assert "tmrun: job failed: node1 rank 1: exit code 42" in lab.output()


def test_restart_within_the_budget(lab: Lab, script: Path) -> None:
    lab.launch("--local-nodes", "2", "--max_restarts=1", script=script, script_args=("exit",))
    assert lab.launches[0].wait(DEADLINE_S) == 42
    assert "rank 1 of 2 restart 1" in lab.output()
    assert "(after 1 restart)" in lab.output()


def test_a_script_without_our_api_is_restarted_after_a_kill(lab: Lab, script: Path) -> None:
    lab.launch("--local-nodes", "3", "--nnodes", "2", "--standby", "1", script=script, script_args=("sleep",))
    wait_for("workers", lambda: lab.output().count("of 2 restart 0") == 2)
    pids = wait_for("pids", lambda: lab.node("node1")["pids"])
    os.kill(pids[0], signal.SIGKILL)
    wait_for("restart", lambda: lab.output().count("of 2 restart 1") == 2)
    assert lab.cli("stop").returncode == 0
    assert lab.launches[0].wait(DEADLINE_S) == 143


def test_standby_ends_well(lab: Lab, script: Path) -> None:
    """A spare is no failure at the end of the job; its script never ran."""
    lab.launch("--nnodes", "1", "--standby", "6%", script=script, script_args=("done",))
    assert lab.launches[0].wait(DEADLINE_S) == 0
    assert lab.output().count("of 1 restart 0") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signals_to_the_launcher(lab: Lab, script: Path, number: signal.Signals, code: int) -> None:
    lab.launch("--local-nodes", "2", script=script, script_args=("sleep",))
    wait_for("workers", lambda: lab.output().count("of 2 restart 0") == 2)
    lab.launches[0].send_signal(number)
    assert lab.launches[0].wait(DEADLINE_S) == code


def test_a_host_that_gets_sigterm_leaves_and_the_job_goes_on(lab: Lab, script: Path, tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        where = ("--etcd", etcd.url, "--job", "one")
        for name in ("a", "b"):
            lab.launch(*where, "--nnodes", "1", "--standby", "1", "--node-name", name, script=script, script_args=("sleep",))
        wait_for("both", lambda: len(lab.status(*where).get("nodes", ())) == 2 and lab.status(*where)["state"] == "running")
        spare = next(n["name"] for n in lab.status(*where)["nodes"] if n["role"] != "active")
        leaver, stayer = lab.launches["ab".index(spare)], lab.launches["ba".index(spare)]
        leaver.send_signal(signal.SIGTERM)
        assert leaver.wait(DEADLINE_S) == 143
        assert [n["name"] for n in lab.status(*where)["nodes"]] != [] and stayer.poll() is None
        assert lab.status(*where)["state"] == "running"
        assert lab.cli("stop", *where).returncode == 0
        assert stayer.wait(DEADLINE_S) == 143


def test_the_store_outlives_the_node_of_its_host(lab: Lab, script: Path) -> None:
    """The agent of the host that runs the store leaves by itself; the others still need the store, also the end of the job."""
    where = ("--etcd", (place := f"127.0.0.1:{free_port()}"), "--job", "one")
    common = ("--rdzv-endpoint", place, "--job", "one", "--nnodes", "1", "--standby", "1")
    lab.launch(*common, "--node-name", "a", "--node-rank", "1", script=script, script_args=("sleep",))
    wait_for("the store", lambda: "this host runs the store of the job" in lab.output())
    lab.launch(*common, "--node-name", "b", "--node-rank", "0", script=script, script_args=("sleep",))
    wait_for("both", lambda: len(lab.status(*where).get("nodes", ())) == 2 and lab.status(*where)["state"] == "running")
    os.kill(lab.agents()["a"], signal.SIGTERM)
    wait_for("it stays", lambda: "this host runs the job's store, which b still needs: it stays until the job ends" in lab.output())
    wait_for("the job goes on", lambda: lab.status(*where).get("state") == "running")
    assert lab.cli("stop", *where).returncode == 0
    assert [launch.wait(DEADLINE_S) for launch in lab.launches] == [143, 143]


SAVES = r"""
import os, signal, sys, time
def save(number, _):
    time.sleep(1)
    open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
sys.stdout.write(f"rank {os.environ['RANK']} ready\n")
time.sleep(600)
"""
"""The usual way to be preempted: SIGTERM, a checkpoint, the end."""


def test_workers_that_nobody_can_take_over_get_sigterm(lab: Lab, tmp_path: Path) -> None:
    """One of two hosts is told to go, then the other one; in a second job both at once. Each can save, and the job does not stay open."""
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        for job, together in (("one", False), ("two", True)):
            saved = tmp_path / job
            saved.mkdir()
            where = ("--etcd", etcd.url, "--job", job)
            found = [lab.launch(*where, "--nnodes", "2", "--node-rank", r, script=script, script_args=(str(saved),)) for r in "01"]
            hosts = [lab.launches[i] for i in found]
            wait_for("workers", lambda found=found: all(f"rank {r} ready" in lab.output(i) for r, i in enumerate(found)))
            for host in hosts:
                host.send_signal(signal.SIGTERM)
                if not together:
                    assert host.wait(60) == 143, lab.output(lab.launches.index(host))
            assert [host.wait(60) for host in hosts] == [143, 143]
            assert sorted(path.name for path in saved.iterdir()) == ["0", "1"]
            assert lab.status(*where)["state"] == "stopped"


def test_nodes_that_never_come(lab: Lab, script: Path, tmp_path: Path) -> None:
    """For the first start, and to restart on; nobody holds an allocation for longer than --join-timeout."""
    error = tmp_path / "error.json"
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        flags = ("--etcd", etcd.url, "--nnodes", "2", "--lease-ttl", "3")
        lab.launch(*flags, "--job", "one", "--join-timeout", "3", script=script, script_args=("sleep",), TORCHELASTIC_ERROR_FILE=str(error))
        for name in ("a", "b"):
            lab.launch(*flags, "--job", "two", "--join-timeout", "20", "--node-name", name, script=script, script_args=("sleep",))
        assert lab.launches[0].wait(60) == 1
        assert "tmrun: job failed: only 1 of 2 nodes came within 3 s; here: " in lab.output()
        assert "only 1 of 2 nodes came within 3 s" in error.read_text()
        wait_for("workers", lambda: all("of 2 restart 0" in lab.output(i) for i in (1, 2)))
        os.kill(lab.launches[2].pid, signal.SIGKILL)
        assert lab.launches[1].wait(90) == 1
        assert "only 1 of 2 nodes to restart on within 20 s; missing: b" in lab.output(1)


def test_the_host_of_the_only_store_is_lost(lab: Lab, script: Path) -> None:
    """Its workers, agent and etcd, all at once: who is left has no work and nobody to ask, and does not wait for ever."""
    flags = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nnodes", "2", "--lease-ttl", "3", "--join-timeout", "15")
    lab.launch(*flags, "--node-name", "a", script=script, script_args=("sleep",))
    wait_for("the store", lambda: "this host runs the store of the job" in lab.output())
    lab.launch(*flags, "--node-name", "b", script=script, script_args=("sleep",))
    wait_for("workers", lambda: all("of 2 restart 0" in lab.output(i) for i in (0, 1)))
    for pid in (lab.launches[0].pid, *below(lab.launches[0].pid)):
        os.kill(pid, signal.SIGKILL)
    assert lab.launches[1].wait(90) == 6
    assert "tmrun: the store of job job is lost: nothing is left to do here" in lab.output(1)
    lab.cli("--nnodes", "1", "--no-python", "true")  # removes the folder that nobody was left to remove


BAD = {
    "no such script": (("nope.py",), 2, "script 'nope.py' does not exist"),
    "no such module is the program's own error": (("-m", "no_such_module_here"), 1, "job failed"),
    "standby": (("--standby", "many", "{script}", "done"), 2, "--standby 'many': expected a number of nodes (2) or a share"),
    "too few local nodes": (("--local-nodes", "1", "--nnodes", "2", "{script}", "done"), 2, "--local-nodes 1 is too few for 2 active + 0"),
    "unknown flag": (("--nonsense", "{script}"), 2, "no such option '--nonsense'"),
    "nothing to run": (("--nnodes", "2"), 2, "missing argument 'SCRIPT"),
    "etcd without a job id": (("--etcd", "127.0.0.1:1", "{script}", "done"), 2, "--etcd needs --job ID"),
    "etcd unreachable": (("--etcd", "127.0.0.1:1", "--job", "x", "{script}", "done"), 6, "127.0.0.1:1"),
    "two stores": (("--etcd", "h", "--rdzv-endpoint", "h", "{script}"), 2, "exclude each other"),
    "label": (("--label", "rack", "{script}", "done"), 2, "--label 'rack': expected KEY=VALUE"),
    "node name": (("--node-name", "a/b", "{script}", "done"), 2, "--node-name 'a/b': use letters"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(lab: Lab, script: Path, case: str) -> None:
    arguments, code, text = BAD[case]
    answer = lab.cli(*(a.format(script=script) for a in arguments))
    assert (answer.returncode, text in answer.stderr) == (code, True), answer.stderr
    assert case.startswith("no such module") or answer.stderr.count("\n") == 1, answer.stderr


def test_a_port_that_is_taken(lab: Lab, script: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        answer = lab.cli("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", str(script), "done")
    assert answer.returncode == 2
    assert f"port {port} on 127.0.0.1 is taken" in answer.stderr


def test_verbs_without_a_job(lab: Lab) -> None:
    verbs = (("status",), ("history",), ("drain", "node1"), ("undrain", "node1"), ("stop",))
    for verb in verbs:
        answer = lab.cli(*verb)
        assert answer.returncode == 7, verb
        assert answer.stderr.startswith("tmrun: no job is running on this machine"), verb
    with ThreadPoolExecutor() as pool:  # each tries for a while
        for unreachable in pool.map(lambda verb: lab.cli(*verb, "--etcd", "127.0.0.1:1"), verbs):
            assert unreachable.returncode == 6, (unreachable.args, unreachable.stderr)


def test_unknown_node(lab: Lab, script: Path) -> None:
    lab.launch("--local-nodes", "2", script=script, script_args=("sleep",))
    wait_for("workers", lambda: lab.output().count("of 2 restart 0") == 2)
    answer = lab.cli("drain", "node7")
    assert answer.returncode == 7
    assert answer.stderr.strip().endswith("nodes: node0, node1")
    assert lab.cli("status", "nothing-of-that-name").returncode == 7
    lab.cli("stop")
    assert lab.launches[0].wait(DEADLINE_S) == 143


def test_hosts_with_different_commands(lab: Lab, script: Path, tmp_path: Path) -> None:
    """Another layout is refused; each host has arguments, and a place for the script, of its own."""
    elsewhere = tmp_path / "scratch" / script.name
    elsewhere.parent.mkdir()
    elsewhere.write_text(script.read_text())
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        lab.launch("--etcd", etcd.url, "--job", "one", "--nnodes", "2", "--node-name", "a", script=script, script_args=("done",))
        wait_for("registration", lambda: lab.status("--etcd", etcd.url).get("nodes"))
        other = lab.cli("--etcd", etcd.url, "--job", "one", "--nnodes", "3", "--node-name", "b", str(script), "done")
        assert other.returncode == 2
        assert "job one was launched with nnodes 2, here it is 3" in other.stderr
        flags = ("--etcd", etcd.url, "--job", "one", "--nnodes", "2", "--node-name", "b")
        lab.launch(*flags, script=elsewhere, script_args=("done", "--node_rank=1"))
        assert [launch.wait(DEADLINE_S) for launch in lab.launches] == [0, 0]
        assert f"given {[str(script), 'done']}" in lab.output(0)
        assert f"given {[str(elsewhere), 'done', '--node_rank=1']}" in lab.output(1)
