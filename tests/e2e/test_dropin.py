"""Scripts that never heard of tmrun: they run as under torchrun, and how they end is told better."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from e2e_lab import DEADLINE_S, Lab, free_port, wait_for

from tmrun.store.embedded import EmbeddedEtcd

TRAIN = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        loss = model(torch.randn(2, 4)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        sys.stdout.write(f"loss {dist.get_rank()} {step} {loss.item().hex()}\\n")  # in one piece
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.barrier()
    rank0 = dist.get_rank() == 0
    ours = any(m.startswith("tmrun") for m in sys.modules)
    sys.stdout.write(f"store {store.add('mine', 1) >= 1} {dist.is_torchelastic_launched()} {ours}\\n")
    dist.barrier()
    print("env", dict(os.environ), flush=True) if rank0 else None
    dist.destroy_process_group()

main()
"""
"""Uses what torchrun gives: env:// through the agent's TCPStore, its own client of that store, @record."""
OURS = {"GLOO_SOCKET_IFNAME", "ENV"}


def said(text: str, word: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith(word))


def test_the_same_as_under_torchrun(lab: Lab, tmp_path: Path) -> None:
    """Losses, environment and exit code, with nothing of tmrun in the process."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    theirs = subprocess.run(argv, env=lab.environment(), text=True, capture_output=True, timeout=DEADLINE_S, check=False)
    ours = lab.cli("--nproc-per-node", "2", str(script))
    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr + ours.stderr
    assert said(ours.stdout, "loss") == said(theirs.stdout, "loss")
    assert len(said(ours.stdout, "loss")) == 10
    assert said(ours.stdout, "store") == said(theirs.stdout, "store") == ["store True True False"] * 2
    mine, other = (ast.literal_eval(said(x.stdout, "env")[0][4:]) for x in (ours, theirs))
    assert other.keys() <= mine.keys(), "a variable that torchrun sets is missing"
    assert {k for k in mine.keys() - other.keys() if not k.startswith("TMRUN_")} <= OURS
    differ = {k for k in other if other[k] != mine[k]}
    assert differ <= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


FAIL = """
import os, subprocess, sys, time
from pathlib import Path
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"start {rank} {restart} {os.environ['TORCHELASTIC_MAX_RESTARTS']} {sys.argv[1:]}\\n")
folder = Path(sys.argv[1])
(folder / f"{rank}.{restart}").touch()
while len(list(folder.glob(f"*.{restart}"))) < 4: time.sleep(0.05)
if rank == "2" and restart == "0": raise ValueError("mine")
if rank == "2":
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 11)
time.sleep(1 if rank == "0" else 600)
raise RuntimeError("Connection closed by peer")
"""
"""Rank 2 is the cause, twice; rank 0 on the other node fails as an echo."""


def test_a_failure_is_told_from_its_cause(lab: Lab, tmp_path: Path) -> None:
    """Two nodes, one restart within the job's budget: same ranks, separate logs, one report, error files for whoever reads them."""
    script = tmp_path / "fail.py"
    script.write_text(FAIL)
    (tmp_path / "seen").mkdir()
    flags = (
        "--local-nodes",
        "2",
        "--nproc_per_node=2",
        "--max-restarts",
        "1",
        "--log-dir",
        str(tmp_path / "logs"),
        "-t",
        "0:2",
        "-r",
        "1:1",
    )
    error = tmp_path / "launcher_error.json"
    launch = lab.launch(*flags, script=script, script_args=(str(tmp_path / "seen"), "${local_rank}"), TORCHELASTIC_ERROR_FILE=str(error))
    assert lab.launches[launch].wait(DEADLINE_S) == 128 + signal.SIGSEGV
    out = lab.output()
    assert "restarting all workers (restart 1): node1 rank 2: exit code 1: ValueError: mine" in out
    assert f"start 2 1 1 ['{tmp_path / 'seen'}', '0']" in out
    assert "[default0]:last words" in out
    report = out[out.index("fail.py FAILED") :]
    cause = report[: report.index("Other failures")] if "Other failures" in report else report
    for text in ("host      : node1", "rank      : 2 (local_rank: 0)", "139 (pid: ", "SIGSEGV", "last words", "after 1 restart"):
        assert text in cause, out
    assert json.loads(error.read_text())["message"]["errorCode"] == 139
    (folder,) = (tmp_path / "logs").glob("*_node1_*")
    first = json.loads((folder / "attempt_0/0/error.json").read_text())["message"]
    assert first["message"] == "ValueError: mine"
    assert "fail.py" in first["extraInfo"]["py_callstack"]
    assert (folder / "attempt_1/0/stderr.log").read_text().endswith("last words\n")
    assert (folder / "attempt_0/1/stdout.log").read_text().startswith("start 3 0 1")


SIGNALLED = r"""
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])  # in this process group, as a DataLoader's workers are
def told(number, _):
    time.sleep(0.5)
    sys.stdout.write(f"got {signal.Signals(number).name}, child {child.poll()}\n")  # in one piece
for name in ("SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), told)
sys.stdout.write("ready\n")
while True: time.sleep(0.1)
"""


def test_signals_are_passed_on(lab: Lab, tmp_path: Path) -> None:
    """nohup is honoured, SIGUSR1 reaches workers, and nobody else, that go on, Ctrl-C reaches all as SIGINT, a second one does not wait."""
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        lab.launch("--nproc-per-node", "2", "--shutdown-timeout", "600", script=script, script_args=())
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher = lab.launches[0]
    for number, seen in ((signal.SIGHUP, "ready"), (signal.SIGUSR1, "got SIGUSR1, child None"), (signal.SIGINT, "got SIGINT, child -2")):
        wait_for("workers", lambda: lab.output().count("ready") == 2)
        launcher.send_signal(number)
        wait_for(seen, lambda seen=seen: lab.output().count(seen) == 2)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 130
    assert "tmrun: stopping the job; once more kills it" in lab.output()


def test_a_program_of_its_own(lab: Lab, tmp_path: Path) -> None:
    """It reads what the launcher is given, also below a folder whose name is too long for a socket's."""
    (tmp_path / "job.sh").write_text("#!/bin/sh\nread word; echo program $RANK $1 $word\nexit 3\n")
    (tmp_path / "job.sh").chmod(0o755)
    deep = lab.folder / "tmp" / ("deep" * 25)
    deep.mkdir()
    answer = lab.cli("--no-python", str(tmp_path / "job.sh"), "x${local_rank}", said="typed\n", TMPDIR=str(deep))
    assert (answer.returncode, answer.stdout) == (3, "program 0 x0 typed\n"), answer.stderr
    assert list(deep.glob("tmrun-*/*")) == []


def test_interpreters_that_somebody_put_in_between(lab: Lab, tmp_path: Path) -> None:
    """A wrapper that forgets ``exec`` runs plain scripts; one that the kernel refuses is this machine's failure, told with the reason."""
    script = tmp_path / "plain.py"
    script.write_text("import sys, tmrun; print('took part:', 'torch' in sys.modules); raise SystemExit(5)")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    answer = lab.cli(str(script), PYTHON_EXEC=str(wrapper))
    assert (answer.returncode, answer.stdout) == (5, "took part: False\n"), answer.stderr
    assert "$PYTHON_EXEC starts Python as a process below itself" in answer.stderr
    wrapper.write_bytes(b"\x7fELF")
    answer = lab.cli(str(script), PYTHON_EXEC=str(wrapper))
    assert answer.returncode == 1
    assert "restarting all workers (restart 1): node0 rank 0: its workers cannot be started: [Errno 8] Exec format error" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_ctrl_c_while_waiting(lab: Lab, tmp_path: Path) -> None:
    """Static rendezvous of two launchers on one machine: the first waits for the second, and can be interrupted at once."""
    script = tmp_path / "never.py"
    script.touch()
    flags = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint")
    lab.launch(*flags, f"127.0.0.1:{free_port()}", script=script, script_args=())
    wait_for("waiting", lambda: lab.status().get("state") == "rendezvous")
    lab.launches[0].send_signal(signal.SIGINT)
    assert lab.launches[0].wait(60) == 130
    lab.launch(*flags, "192.0.2.1:1", "--insecure", script=script, script_args=())
    wait_for("waiting", lambda: "waiting for the store at" in lab.output(1))
    lab.launches[1].send_signal(signal.SIGTERM)
    assert lab.launches[1].wait(60) == 143
    assert lab.output(1).splitlines()[-1] == "tmrun: interrupted by SIGTERM"


def test_node_ranks_and_an_id_can_be_used_again(lab: Lab, tmp_path: Path) -> None:
    """Two launchers on one machine, the later one asks for slot 0; then the same job id once more in the same etcd."""
    script = tmp_path / "who.py"
    script.write_text(
        "import os; e = os.environ\n"
        "print('at', e['TMRUN_AGENT_SOCKET'].rpartition('/')[2], e['GROUP_RANK'], e['TORCHELASTIC_RESTART_COUNT'], e['MASTER_PORT'])"
    )
    port = free_port()
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        flags = ("--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.url.removeprefix("http://"), "--rdzv-id", "team/a: 1", "--nnodes", "2")
        for turn in range(2):
            lab.launch(*flags, "--node-rank", "1", "--node-name", "first", script=script, script_args=())
            wait_for("the first", lambda: lab.status("--etcd", etcd.url, "team/a: 1").get("nodes"))
            lab.launch(*flags, "--node-rank", "0", "--node-name", "second", "--master-port", str(port), script=script, script_args=())
            assert [launch.wait(DEADLINE_S) for launch in lab.launches[-2:]] == [0, 0], lab.output(2 * turn)
            assert f"at first.sock 1 0 {port}" in lab.output(2 * turn)
            assert f"at second.sock 0 0 {port}" in lab.output(2 * turn + 1)


RESUMES = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
path = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer, step = torch.optim.SGD(model.parameters(), 0.1), 0
if path.exists():
    step, weights = torch.load(path)
    model.load_state_dict(weights)
sys.stdout.write(f"begins {dist.get_rank()} {os.environ['GROUP_RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {step}\\n")
while step < 30:
    torch.manual_seed(100 * step + dist.get_rank())
    loss = model(torch.randn(2, 4)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    step += 1
    if dist.get_rank() == 0:
        torch.save((step, model.state_dict()), f"{path}.new"); os.replace(f"{path}.new", path)
    dist.barrier()
    while step == 5 and not path.with_name("go").exists(): time.sleep(0.05)
sys.stdout.write(f"final {dist.get_rank()} {loss.item().hex()}\\n")
dist.destroy_process_group()
"""


def test_a_plain_script_comes_back_from_its_checkpoint(lab: Lab, tmp_path: Path) -> None:
    """A node is lost; those who lost their peer are not to blame, and all start again as the same ranks, one of them on the standby."""
    script = tmp_path / "resumes.py"
    script.write_text(RESUMES)
    (tmp_path / "oracle").mkdir()
    (tmp_path / "oracle" / "go").touch()
    oracle = lab.cli("--nproc-per-node", "2", str(script), str(tmp_path / "oracle" / "state"))
    assert oracle.returncode == 0, oracle.stderr
    (tmp_path / "job").mkdir()
    state = tmp_path / "job" / "state"
    lab.launch("--local-nodes", "3", "--nnodes", "2", "--standby", "1", script=script, script_args=(str(state),))
    wait_for("training", lambda: state.exists() and len(said(lab.output(), "begins")) == 2)
    (victim,) = (n["name"] for n in lab.status()["nodes"] if n["ranks"] == [1])
    os.kill(lab.agents()[victim], signal.SIGKILL)
    (tmp_path / "job" / "go").touch()
    assert lab.launches[0].wait(DEADLINE_S) == 0, lab.output()
    again = [line for line in said(lab.output(), "begins") if line.split()[3] == "1"]
    assert [line.split()[1:3] for line in again] == [["0", "0"], ["1", "1"]]
    assert all(int(line.split()[4]) >= 1 for line in again)
    assert said(lab.output(), "final") == said(oracle.stdout, "final")


CATCHES = """
import runpy, sys, traceback
try:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
except Exception:
    traceback.print_exc()
    sys.exit(1)
"""
"""As Hydra and others run a script: what ended it is only on stderr."""


def test_a_lost_host_restarts_a_plain_program_long_before_its_lease_runs_out(lab: Lab, tmp_path: Path) -> None:
    """One launcher a host, a shell script, no files; the host that goes is the coordinator's. Who lost it is not blamed, though nothing but
    stderr tells, and its sweeper's word is asked for."""
    script, state, program = tmp_path / "resumes.py", tmp_path / "state", tmp_path / "job.sh"
    script.write_text(RESUMES)
    (tmp_path / "catches.py").write_text(CATCHES)
    program.write_text(f"#!/bin/sh\n{sys.executable} {tmp_path}/catches.py {script} {state}\n")
    program.chmod(0o755)
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        where = ("--etcd", etcd.url, "--job", "plain")
        flags = ("--nnodes", "2", "--standby", "1", "--lease-ttl", "120", "--max-restarts", "0", "--no-python", "--log-dir", "/dev/null")
        for name in "abc":
            lab.launch(*where, *flags, "--node-name", name, script=program, script_args=())

        def begun(restart: int) -> list[list[str]]:
            words = (line.split() for i in range(3) for line in said(lab.output(i), "begins"))
            return sorted(w[1:3] for w in words if w[3] == str(restart))

        wait_for("training", lambda: state.exists() and len(begun(0)) == 2)
        now = lab.status(*where)
        seated = [n["name"] for n in now["nodes"] if n["ranks"]]
        victim = now["coordinator"] if now["coordinator"] in seated else seated[0]
        lab.launches["abc".index(victim)].kill()
        (tmp_path / "go").touch()
        wait_for("all start again", lambda: begun(1) == [["0", "0"], ["1", "1"]], 100)
        assert sorted(launch.wait(DEADLINE_S) for launch in lab.launches) == [-9, 0, 0]
        assert sum(len(said(lab.output(i), "final")) for i in range(3)) == 2


TIMED = """
import datetime, os, time
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 1, scope="load"):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(3600)
print("loaded", flush=True)
"""


def test_a_block_that_is_not_left_in_time(lab: Lab, tmp_path: Path) -> None:
    """torch's file timer ends the worker; its agent lives on and starts it again."""
    script = tmp_path / "timed.py"
    script.write_text(TIMED)
    lab.launch("--max-restarts", "1", script=script, script_args=(), TORCHELASTIC_ENABLE_FILE_TIMER="1")
    assert lab.launches[0].wait(DEADLINE_S) == 0, lab.output()
    assert "killed by SIGKILL: its timer 'load' ran out" in lab.output()
    assert said(lab.output(), "loaded") == ["loaded"]
