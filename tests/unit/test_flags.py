"""Whoever types torchrun's command line can type ours: every flag in every spelling, every variable, a file, and their order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from tmrun.cli import numa, run
from tmrun.cli.arguments import spelled_out
from tmrun.cli.flags import NUMA_MODES, Flags
from tmrun.cli.launch import Launch
from tmrun.core.errors import UsageError
from tmrun.store.embedded import BINARY_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]
VALUES = {
    "nnodes": "2", "nproc_per_node": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "h:1", "start_method": "fork", "max_restarts": "2",
    "monitor_interval": "2", "node_rank": "2", "master_port": "2", "numa_binding": "node", "shutdown_timeout": "2", "redirects": "2",
    "tee": "2", "duplicate_stdout_filters": "a,b", "duplicate_stderr_filters": "a,b", "local_ranks_filter": "2",
    "signals_to_handle": "SIGUSR1", "rdzv_conf": "timeout=2",
}  # fmt: skip
"""Something other than the default, for each of torchrun's flags that takes more than a free text."""
RENAMED = {"rdzv_id": "job"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("TMRUN_", "PET_", "TORCH"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def parsed(*arguments: str) -> dict[str, Any]:
    """The parameters of `tmrun run` for this command line."""
    return dict(run.command.make_context("run", list(arguments)).params)


def launch(*arguments: str) -> Launch:
    given = parsed(*arguments)
    return run.checked(Flags(**{k: v for k, v in given.items() if k != "command_line"}), given["command_line"])


@pytest.mark.parametrize("action", TORCHRUN, ids=lambda a: a.dest)
def test_every_flag_of_torchrun(action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that a later torch adds fails here until it has a counterpart."""
    name = RENAMED.get(action.dest, action.dest)
    flag = action.nargs == 0
    value = VALUES.get(action.dest, "text")
    default = parsed("train.py")[name]
    assert not default or not action.default or default == action.default, "torchrun's default, or none where ours follows from others"
    changed = set()
    for spelling in action.option_strings:
        changed.add(str(parsed(spelling, *([] if flag else [value]), "train.py", spelling)[name]))
        if not flag and spelling.startswith("--"):
            changed.add(str(parsed(f"{spelling}={value}", "train.py")[name]))
    monkeypatch.setenv(f"PET_{action.dest.upper()}", "1" if flag else value)
    changed.add(str(parsed("train.py")[name]))
    assert len(changed) == 1, changed
    assert changed != {str(default)}


def test_numa_modes_are_torchs() -> None:
    (action,) = [a for a in TORCHRUN if a.dest == "numa_binding"]
    assert tuple(action.choices or ()) == NUMA_MODES


def test_the_order_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("job.toml").write_text('nnodes = "3"\nrole = "file"\nlog_dir = "file"\n[label]\nrack = "r1"\n')
    monkeypatch.setenv("TMRUN_CONFIG", "job.toml")
    monkeypatch.setenv("PET_NNODES", "4")
    monkeypatch.setenv("PET_ROLE", "pet")
    monkeypatch.setenv("TMRUN_ROLE", "ours")
    found = parsed("--nnodes", "5", "train.py")
    assert (found["nnodes"], found["role"], found["log_dir"], found["tee"]) == ("5", "ours", "file", "0")
    assert found["label"] == ("rack=r1",)
    assert parsed("train.py")["nnodes"] == "4"


def test_a_variable_of_a_flag_that_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command and a path may hold spaces; a label cannot."""
    monkeypatch.setenv("TMRUN_NOTICE_COMMAND", "check --node x\n  ask 'a b'\n\n")
    monkeypatch.setenv("TMRUN_NOTICE_FILE", "/a folder/gone")
    monkeypatch.setenv("TMRUN_LABEL", "rack=r1 zone=z2")
    found = parsed("train.py")
    assert found["notice_command"] == ("check --node x", "ask 'a b'")
    assert found["notice_file"] == ("/a folder/gone",)
    assert found["label"] == ("rack=r1", "zone=z2")
    assert parsed("--notice-command", "mine", "train.py")["notice_command"] == ("mine",)


def test_the_variable_that_names_the_etcd_program_is_no_flags() -> None:
    flags = {name for param in run.command.params for name in param.envvar or ()}
    assert "TMRUN_ETCD" in flags
    assert BINARY_VARIABLE not in flags


def test_what_follows_the_script_is_the_scripts() -> None:
    tail = ("--r=16", "--nnodes", "7", "-m", "--", "--help", "${local_rank}", "-")
    assert parsed("--nnodes", "2", "train.py", *tail)["command_line"] == ("train.py", *tail)
    assert parsed("--", "train.py", *tail)["command_line"] == ("train.py", *tail)
    assert parsed("-mr", "3", "pkg.train", *tail)["command_line"] == ("pkg.train", *tail)
    assert parsed("-r3", "-t", "0:1", "train.py")["redirects"] == "3"


def test_a_unique_beginning_is_the_flag() -> None:
    assert parsed("--nproc", "4", "--max_r=2", "--standa", "train.py", "--nproc", "9")["nproc_per_node"] == "4"
    names = {option.replace("_", "-"): a.dest for a in TORCHRUN for option in a.option_strings if option.startswith("--")}
    for name, dest in names.items():
        for end in range(3, len(name)):
            if {d for n, d in names.items() if n.startswith(name[:end])} == {dest}:
                spelled = spelled_out(run.command, [name[:end], "train.py"])[0]
                assert names[spelled] == dest, f"{name[:end]} is {name} to torchrun"
    with pytest.raises(UsageError, match=r"--rdzv can mean --rdzv-backend, --rdzv-conf, --rdzv-endpoint, --rdzv-id"):
        parsed("--rdzv", "x", "train.py")


BAD_FILES = {
    "nnode = 2": r"unknown key 'nnode'; did you mean nnodes\?",
    "nnodes = [[1]]": "nnodes: expected plain values",
    "nnodes = ": "not TOML",
    "max_restarts = -1": r"-1 .*\(from bad.toml\)",
    'config = "x"': "unknown key 'config'",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_is_one_clear_line(text: str) -> None:
    Path("bad.toml").write_text(text)
    with pytest.raises(UsageError, match=BAD_FILES[text]):
        parsed("--config", "bad.toml", "train.py")


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "many")
    with pytest.raises(UsageError, match=r"'many'.*\(from \$PET_MAX_RESTARTS\)"):
        parsed("train.py")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_every_example_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMRUN_SECRET", "0" * 32)
    monkeypatch.setattr(run, "devices", lambda name: {"gpu": 8}.get(name))
    made = launch("--config", str(path), "train.py")
    assert made.spec.nnodes >= 2
    assert made.spec.standby >= 1


# -- where nodes meet ---------------------------------------------------------------------------------------------------------------
def test_min_max_is_layout_and_standbys() -> None:
    made = launch("--nnodes", "2:5", "--rdzv-endpoint", "127.0.0.1:1", "train.py")
    assert (made.spec.nnodes, made.spec.standby) == (2, 3)
    for bad in ("0", "3:2", "2:", "a", "1:2:3"):
        with pytest.raises(UsageError, match=f"--nnodes '{bad}'"):
            launch("--nnodes", bad, "train.py")
    with pytest.raises(UsageError, match="not both"):
        launch("--nnodes", "1:2", "--standby", "1", "train.py")


ALONE: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "standalone": ("--standalone", "--rdzv-endpoint", "elsewhere:1", "--rdzv-id", "x"),
    "a random port": ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
    "its standby too": ("--nnodes", "1", "--standby", "1"),
    "its standby too, a random port": ("--nnodes", "1", "--standby", "1", "--rdzv-endpoint", "localhost:0"),
    "another master port": ("--master-port", "29507"),
    "a master address": ("--master-addr", "myhost", "--master_port=29507"),
}


@pytest.mark.parametrize("case", ALONE)
def test_one_node_is_alone(case: str) -> None:
    made = launch("--nproc-per-node", "2", *ALONE[case], "train.py")
    assert (made.store.endpoints, made.where.local) == ((), 1 + made.spec.standby)
    assert made.where.master_port == (29507 if ("master" in case and "another" in case) or case == "a master address" else 0)


MEETINGS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, int], ...], int]] = {
    "static default": ((), (("127.0.0.1", 29501),), 29500),
    "static": (("--master-addr", "::1", "--master-port", "4000", "--node-rank", "0"), (("::1", 4001),), 4000),
    "static endpoint": (("--rdzv-endpoint", "127.0.0.1:4000"), (("127.0.0.1", 4000),), 0),
    "c10d": (("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost"), (("localhost", 29400),), 0),
    "c10d default": (("--rdzv-backend", "c10d"), (("localhost", 29400),), 29399),
}


@pytest.mark.parametrize("case", MEETINGS)
def test_several_nodes_meet(case: str) -> None:
    flags, hosts, port = MEETINGS[case]
    if "::1" in flags:
        flags = tuple("[::1]" if f == "::1" else f for f in flags)
    made = launch("--nnodes", "2", *flags, "train.py")
    assert (made.store.endpoints, made.where.local) == (hosts, 0)
    assert case == "c10d default" or made.where.master_port == port


def test_one_node_and_standbys_on_other_hosts_meet_where_they_are_told_to() -> None:
    """Else each host would train by itself."""
    for flags in (("--nnodes", "1", "--standby", "6%"), ("--nnodes", "1:2")):
        made = launch(*flags, "--rdzv-endpoint", "127.0.0.1:4000", "train.py")
        assert (made.store.endpoints, made.where.local, made.spec.standby) == ((("127.0.0.1", 4000),), 0, 1)
    made = launch("--nnodes", "1", "--standby", "1", "--master-addr", "127.0.0.1", "--master-port", "4000", "train.py")
    assert (made.store.endpoints, made.where.local) == ((("127.0.0.1", 4001),), 0)


def test_the_second_node_of_static_leaves_the_master_port_to_the_first() -> None:
    made = launch("--nnodes", "2", "--node-rank", "1", "--master-port", "4000", "train.py")
    assert (made.where.node_rank, made.where.master_port, made.store.endpoints) == (1, 0, (("127.0.0.1", 4001),))


@pytest.mark.parametrize("job", ["team/run:7", "_x", "a=b c", "größe", "n" * 200])
def test_ids_that_torchrun_takes(job: str) -> None:
    made = launch("--rdzv-endpoint", "127.0.0.1:1", "--nnodes", "2", "--rdzv-id", job, "train.py")
    assert made.job == job


def test_etcd_as_torchrun_spells_it() -> None:
    made = launch("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "e:2379", "--rdzv-id", "x", "train.py")
    assert made.store.existing is not None
    assert (made.store.existing.endpoints, made.job) == ("http://e:2379", "x")


@pytest.mark.parametrize("quote", ["", "'"], ids=["", "quotes that no shell took away"])
def test_durations_of_rdzv_conf(capsys: pytest.CaptureFixture[str], quote: str) -> None:
    made = launch("--rdzv-conf", f"{quote}join_timeout=9,is_host=1,last_call_timeout=2{quote}", "train.py")
    assert (made.join_timeout_s, made.spec.node_wait_s, made.spec.join_wait_s) == (9, 9, 2)
    assert capsys.readouterr().err == "tmrun: --rdzv-conf is_host: has no effect here\n"


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "a plugin": (("--rdzv-backend", "zeus"), "--rdzv-backend 'zeus'"),
    "a random port for many": (("--nnodes", "2", "--rdzv-endpoint", "h:0"), "random port"),
    "conf": (("--rdzv-conf", "x"), "expected KEY=VALUE"),
    "seconds": (("--rdzv-conf", "timeout=x"), "expected seconds"),
    "nproc": (("--nproc-per-node", "some"), "--nproc-per-node 'some'"),
    "no gpu": (("--nproc-per-node", "gpu"), "torch finds none"),
    "no process": (("--nproc-per-node", "0"), "above 0"),
    "signal": (("--signals-to-handle", "SIGKILL"), "SIGKILL"),
    "an id that cannot be shown": (("--rdzv-id", "a\nb"), "characters that can be printed"),
    "an id without end": (("--rdzv-id", "x" * 201), "at most 200"),
    "streams": (("-t", "4"), "--tee '4'"),
    "filter": (("--local-ranks-filter", "a"), "--local-ranks-filter 'a'"),
    "both": (("--no-python", "-m"), "exclude each other"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_said(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, text = BAD[case]
    monkeypatch.setattr(run, "devices", lambda name: {"gpu": 0}.get(name))
    with pytest.raises(UsageError, match=text):
        launch(*arguments, "train.py")


def test_a_signal_that_does_not_exist_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--signals-to-handle", "SIGTERM,SIGCLOSE, SIGINT", "train.py").signals == (signal.SIGTERM, signal.SIGINT)
    assert capsys.readouterr().err == "tmrun: --signals-to-handle SIGCLOSE: no such signal here, left out; write e.g. SIGTERM,SIGINT\n"


def test_run_path_goes_before_module_and_no_python() -> None:
    for other in ("-m", "--no-python"):
        made = launch("--run-path", other, "train.py", "a")
        assert (made.spec.command, made.spec.no_python) == (("train.py", "a"), False)
    with pytest.raises(UsageError, match=r"script 'pkg\.train' does not exist"):
        launch("--run-path", "-m", "pkg.train")


def test_cpus_near_gpus_are_torchs_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host with three GPUs on one NUMA node of four cores: exclusive, so that each depends on all."""
    from torch.numa import binding

    monkeypatch.setattr(binding, "_get_gpu_count", lambda: 3)
    monkeypatch.setattr(binding, "_get_numa_node_index_for_gpu_index", lambda gpu_index: 0)
    monkeypatch.setattr(binding, "_get_allowed_logical_cpu_indices_for_numa_node", lambda numa_node_index: {0, 1, 2, 3})
    monkeypatch.setattr(binding, "_get_logical_cpu_indices_sharing_same_physical_core_as", lambda logical_cpu_index: {logical_cpu_index})
    assert numa.ask("exclusive", 3) == [{0, 1}, {2}, {3}]
    monkeypatch.setattr(binding, "_get_allowed_logical_cpu_indices_for_numa_node", lambda numa_node_index: set())
    with pytest.raises(RuntimeError, match="no CPU that this process may use is near GPU 0"):
        numa.ask("node", 3)


def test_cpus_of_gpus_that_are_not_there() -> None:
    assert numa.cpus(None, 2) == ()
    with pytest.raises(UsageError, match="--numa-binding node: torch cannot tell the CPUs of 1 GPUs of this host: "):
        numa.cpus("node", 1)


def test_names_for_numbers_of_workers() -> None:
    assert run.workers("cpu") == run.workers("auto") == len(os.sched_getaffinity(0))
    assert run.devices("gpu") == 0
    assert run.devices("nonsense") is None


def test_output_flags() -> None:
    out = launch("-r", "10:3", "-t", "1", "--local_ranks_filter=0,2", "--duplicate-stdout-filters", "a,,b,c", "train.py").output
    assert out.redirects.has(10, 2)
    assert not out.redirects.has(1, 1)
    assert (out.tee.has(7, 1), out.tee.has(7, 2)) == (True, False)
    assert (out.shows(2), out.shows(1), out.copies_out) == (True, False, ("a,b", "c"))


def test_virtual_local_rank_needs_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    launch("--virtual-local-rank", "--nproc-per-node", "2", "train.py")
    with pytest.raises(UsageError, match="local rank 2 has no device"):
        launch("--virtual-local-rank", "--nproc-per-node", "3", "train.py")


def test_an_unknown_flag_is_clicks_error() -> None:
    with pytest.raises(click.NoSuchOption):
        parsed("--nonsense", "train.py")
