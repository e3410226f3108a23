"""Every command of the documentation, run as it stands there but for what this machine does not have.

Three nodes here stand for sixty-eight: other node names, sizes, ports, shorter times (``here``), and ``-y`` where a person would be asked.
ssh and Slurm's commands are stand-ins that do on one machine what the real ones do on several; what cannot be had at all is listed in
``NOT_HERE`` with the reason. A command that belongs nowhere fails the first test. The quick start has a test of its own.
"""

from __future__ import annotations

import re

import pytest
from documented import ROOT, commands
from e2e_lab import DEADLINE_S, Lab, free_port, wait_for
from shell import Shell

ALL = sorted({line for page, line in commands() if page != "docs/quickstart.md"})

NOT_HERE = {
    r"kubectl ": "needs a cluster; the manifests are checked against their schemas",
    r"make test$": "is what runs this",
    r"make bench": "takes hours; what it calls is run with --list",
}
"""Start of a command -> why it is not run."""
SECRET = "0123456789abcdef0123456789abcdef"

LAUNCHES = r"tmrun (run )?--|export TMRUN_SECRET"
CALCULATIONS = r"tmrun (simulate|size) "
SCRIPTS = r"ACTIVE=64 sbatch |configs/slurm/drain.sh|HOSTS=|\(umask"
DEMO = r"make demo"
BENCH = r"python -m bench.compare (show|run core --list)"
COMPLETION = r"eval "
ASKS = r"tmrun (status|top|nodes|events|history|logs|plan|doctor|trace|ok-to-drain \S+$|drain .*--dry-run|pause|resume)|curl "
"""On a job that goes on as before."""
CHANGES = r"tmrun (drain|undrain|ok-to-drain|cordon|replace|chaos) "
"""On a job that has to be put in order afterwards."""
ENDLESS = r"tmrun (top|events -f|logs .*-f$)"

TRAIN = """\
import argparse, time
import torch, torch.distributed as dist
import tmrun
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
steps = 5 * parser.parse_args().epochs
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in tmrun.join(model=model, optimizer=optimizer).steps(steps):
    with step:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.2)
print(f"rank {dist.get_rank()} has trained {steps} steps", flush=True)
"""

SSH = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
export TMRUN_NODE_NAME="host-$1"; shift
exec sh -c "$*"
"""
SCONTROL = "#!/bin/sh\n[ \"$1 $2\" = 'show hostnames' ] || exit 2\nprintf '127.0.0.1\\n127.0.0.2\\n'\n"
SQUEUE = "#!/bin/sh\necho '127.0.0.[1-2]'\n"
SBATCH = """\
#!/bin/sh
shift   # --nodes
export SLURM_JOB_ID=4711 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST='127.0.0.[1-2]'
exec bash "$@"
"""
SRUN = """\
#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done
for NODE in 3 4; do TMRUN_NODE_NAME="node$NODE" "$@" & done
wait
"""


def matching(pattern: str) -> list[str]:
    return [line for line in ALL if re.match(pattern, line) and not (pattern == CHANGES and re.match(ASKS, line))]


@pytest.fixture
def shell(lab: Lab) -> Shell:
    shell = Shell(lab)
    (shell.folder / "train.py").write_text(TRAIN)
    (shell.folder / "configs").symlink_to(ROOT / "configs")
    return shell


def test_every_command_is_run_somewhere() -> None:
    rules = (LAUNCHES, CALCULATIONS, SCRIPTS, DEMO, BENCH, COMPLETION, ASKS, CHANGES, *NOT_HERE)
    assert [line for line in ALL if not any(re.match(rule, line) for rule in rules)] == []
    assert [rule for rule in rules if not any(re.match(rule, line) for line in ALL)] == [], "rules for commands that are not there"


@pytest.mark.parametrize("line", matching(CALCULATIONS))
def test_calculations(shell: Shell, line: str) -> None:
    """For a job an eighth as large."""
    (shell.folder / "plots").mkdir()
    said = shell.must(re.sub(r"\d{3,4}", lambda size: str(int(size[0]) // 8), line))
    assert "%" in said, said


@pytest.mark.parametrize("line", matching(BENCH))
def test_bench(shell: Shell, line: str) -> None:
    shell.must(f"cd {ROOT} && {line}")


def test_completion(shell: Shell) -> None:
    (line,) = matching(COMPLETION)
    said = shell.must(f"{line}; complete -p tmrun")
    assert "complete" in said and said.rstrip().endswith("tmrun")


@pytest.mark.timeout(900)
def test_the_demo(shell: Shell) -> None:
    assert matching(DEMO) == ["make demo"] and "$(BIN)/python examples/demo.py" in (ROOT / "Makefile").read_text()
    assert "bitwise equal" in shell.must("python examples/demo.py", timeout_s=800)


# -- a job, and what is asked of it ---------------------------------------------------------------------------------------------------
def test_an_operators_commands(shell: Shell) -> None:
    lab = shell.lab
    port = free_port()
    flags = ("--local-nodes", "4", "--nnodes", "2", "--nproc-per-node", "1", "--standby", "2", "--metrics", str(port))
    lab.launch(*flags, script_args=("--steps", "100000"))
    try:
        lab.wait_warm()
        for line in sorted(matching(CHANGES), key=lambda line: line.startswith("tmrun chaos")):  # what failed last is asked for below
            node = active(lab)[-1]
            if line.startswith("tmrun undrain"):
                shell.must(f"tmrun drain {node}")
            shell.must(here(line, node))
            settle(shell)
        for line in matching(ASKS):
            done = shell.run(here(line, active(lab)[-1]).replace(":9400", f":{port}"))
            assert done.returncode in ((0, 124) if re.match(ENDLESS, line) else (0,)), (line, done)
            assert (done.stdout + done.stderr).strip(), line
    finally:
        shell.must("tmrun stop -y")


def here(line: str, node: str) -> str:
    """As it can be asked on this machine: ``node`` is one that trains."""
    number = node.removeprefix("node")
    line = re.sub(r"\bnode\d+\b", node, line).replace("node[3-5]", f"node[{number}-{number}]")
    line = re.sub(r"\btrace 12\b", "trace 2", line).replace("--for 1m", "--for 8s")
    line = re.sub(r"^(tmrun (?:replace|chaos) (?!.* -y).*)$", r"\1 -y", line)
    return f"timeout 5 {line}" if re.match(ENDLESS, line) else line


def active(lab: Lab) -> list[str]:
    return [n["name"] for n in lab.status()["nodes"] if n["ranks"]]


def settle(shell: Shell) -> None:
    """Every node may be used again, and a standby is warm."""

    def in_order() -> bool:
        nodes = shell.lab.status().get("nodes", [])
        wanted = [n["name"] for n in nodes if n["state"] in ("drained", "cordoned", "down") or n.get("cordoned")]
        for name in wanted:
            shell.run(f"tmrun undrain {name}; tmrun uncordon {name}")
        return not wanted and len(nodes) == 4

    wait_for("all nodes can be used", in_order)
    shell.lab.wait_warm()


# -- launches -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("line", [x for x in matching(LAUNCHES) if not x.startswith("export")])
def test_launches(shell: Shell, line: str) -> None:
    """Each to its end. A command for several hosts is given on as many as it needs; nobody answers for Kubernetes."""
    surroundings = f"export TMRUN_SECRET={SECRET} NODE_NAME=pod1@https://127.0.0.1:9"
    done = shell.run(f"{surroundings}; {launched(shell, line)}")
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert done.stdout.count("rank 0 has trained 5 steps") == max(1, line.count("...")), done  # not each host by itself


def launched(shell: Shell, line: str) -> str:
    for tool in ("notify", "is-maintenance-near"):  # somebody's own; maintenance is not near
        shell.program(tool, f"#!/bin/sh\n[ {tool} = notify ]\n")
    line = re.sub(r"--n(nodes|proc-per-node) \d+", r"--n\1 1", line) if "--local-nodes" not in line else line
    line = line.replace("http://169.254.169.254", "http://127.0.0.1:9").replace("--metrics 9400", f"--metrics {free_port()}")
    line = line.replace("...", "train.py")
    if "--rdzv-endpoint" not in line:
        return line
    line = re.sub(r"host0(:\d+)?(,host\d(:\d+)?)*", f"127.0.0.1:{free_port()}", line)
    hosts = (f'TMRUN_NODE_NAME=host{i} {line} & PIDS="$PIDS $!"' for i in range(2))
    return f"{'; '.join(hosts)}; for PID in $PIDS; do wait $PID || exit; done".replace("&;", "&")


def test_ssh(shell: Shell) -> None:
    (line,) = matching("HOSTS=")
    shell.program("ssh", SSH)
    line = re.sub(r'HOSTS=\S*"[^"]*"|HOSTS=\S+|HOSTS=\'[^\']*\'', "HOSTS='127.0.0.1 127.0.0.2'", line)
    done = shell.run(f"export HOME=$PWD PORT={free_port()} NPROC=1; {secret()}; {line.replace('ACTIVE=3', 'ACTIVE=1')}")
    assert "rank 0 has trained 15 steps" in done.stdout, (done.stdout, done.stderr)


def test_slurm(shell: Shell) -> None:
    """The batch script on two nodes; a drain of the first, from outside."""
    (submit,) = matching("ACTIVE=64 sbatch ")
    (drain,) = matching("configs/slurm/drain.sh")
    for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE), ("sbatch", SBATCH), ("srun", SRUN)):
        shell.program(name, text)
    prepare = f"export HOME=$PWD PORT={free_port()} NPROC=1;"
    shell.must(f"{prepare} {secret()}")
    job = shell.start(f"{prepare} {submit.replace('64', '1')} --epochs 1000")
    ask = f"{prepare} TMRUN_SECRET=$(cat .tmrun-secret) tmrun"
    there = "--job slurm-4711 --etcd 127.0.0.1:${PORT}"

    def warm() -> bool:
        found = shell.run(f"{ask} nodes {there} --state standby -o name")
        print(found)
        return found.stdout.strip() != ""

    wait_for("a warm standby", warm, 20)
    said = shell.must(f"{prepare} {drain.replace('3-4', '3')}")
    assert "node3 drained (safe to power off)" in said
    shell.must(f"{ask} stop {there} -y")
    assert job.wait(DEADLINE_S) is not None


def secret() -> str:
    """How the documentation makes it; the home is the shell's folder."""
    (line,) = matching(r"\(umask")
    return line
