"""What only a machine can do to a worker: its disk is full, its memory is used up. The ranks move, the program is not blamed.

Needs root, a tmpfs that may be mounted and a memory cgroup that may be made; skipped, and said so, without.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, Lab, Oracle, wait_for
from test_hangs import inject
from test_training_goes_on import assert_exact

from tmrun.store.embedded import EmbeddedEtcd

HOSTS = ("alpha", "beta", "gamma", "delta")
ROOMS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


def new_cgroup(name: str) -> Path | None:
    """A memory cgroup of version 1 or 2."""
    for root, limit in zip(ROOMS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        try:
            (root / name).mkdir()
        except OSError:
            continue
        if (root / name / limit).exists():
            return root / name
        (root / name).rmdir()
    return None


def give(group: Path, megabytes: int) -> None:
    """So much memory and no more than its processes have now."""
    used = next(group / n for n in ("memory.usage_in_bytes", "memory.current") if (group / n).exists())
    limit = next(group / n for n in ("memory.limit_in_bytes", "memory.max") if (group / n).exists())
    limit.write_text(str(int(used.read_text()) + (megabytes << 20)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], check=False).returncode:
        pytest.skip("needs a tmpfs that may be mounted")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def cgroups() -> Iterator[dict[str, Path]]:
    made = {host: new_cgroup(f"tmrun-test-{os.getpid()}-{host}") for host in HOSTS}
    groups = {host: group for host, group in made.items() if group is not None}
    if len(groups) < len(HOSTS):
        pytest.skip("needs a memory cgroup that may be made")
    yield groups
    for group in groups.values():
        wait_for(f"{group.name} empty", lambda group=group: not (group / "cgroup.procs").read_text(), 30)
        group.rmdir()


def test_a_full_disk_then_no_memory(cgroups: dict[str, Path], small_disk: Path, lab: Lab, oracle: Oracle, tmp_path: Path) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--standby", "2", "--job", "machines")
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        os.environ |= (where := {"TMRUN_ETCD": etcd.url, "TMRUN_JOB": "machines"})
        try:
            for host in HOSTS:
                logs = ("--redirects", "1", "--log-dir", str(small_disk)) if host == "alpha" else ()
                more = ("--etcd", etcd.url, "--node-name", host, "--node-rank", str(HOSTS.index(host)), *logs)
                number = lab.launch(*flags, *more, TEST_FAULT=str(lab.folder / "fault"))
                (cgroups[host] / "cgroup.procs").write_text(str(lab.launches[number].pid))
            strike(lab, cgroups, small_disk)
            lab.go_fast()
            assert [launch.wait(DEADLINE_S) for launch in lab.launches] == [0, 0, 0, 0]
        finally:
            for name in where:
                del os.environ[name]
    assert_exact(lab, oracle, 0, 1, 2, 3, may_miss=2)


@pytest.mark.parametrize("pages", [2, 3])
def test_no_room_for_what_runs(small_disk: Path, lab: Lab, tmp_path: Path, pages: int) -> None:
    """For the agent's own files, for those of its workers: said in words. Who writes into a page without room on the disk is killed."""
    fill(small_disk)
    os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - pages * os.sysconf("SC_PAGESIZE"))
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        answer = lab.cli("--etcd", etcd.url, "--job", "full", "--no-python", "true", TMPDIR=str(small_disk))
    assert answer.returncode == 1
    what = {2: "the agent of", 3: "its workers cannot be started: "}[pages]
    assert any(what in line and "No space left on device" in line for line in answer.stderr.splitlines()), answer.stderr
    assert "Traceback" not in answer.stderr


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1 << 12))
        except OSError:
            pass


def strike(lab: Lab, cgroups: dict[str, Path], small_disk: Path) -> None:
    """A disk that is full ends whoever writes on it; a worker that grows is ended by the kernel."""
    lab.wait_warm(2)
    fill(small_disk)
    inject(lab, seat(lab, "alpha"), "print")
    assert "a disk of this host is full or fails" in moved(lab, 2, "alpha")
    lab.wait_warm(1)
    victim = next(n["name"] for n in lab.status()["nodes"] if n["role"] == "active" and n["name"] != "beta")
    give(cgroups[victim], 200)
    inject(lab, seat(lab, victim), "memory")
    assert "out of memory, says this host's cgroup" in moved(lab, 3, victim)


def seat(lab: Lab, host: str) -> int:
    """One of its ranks."""
    rank: int = lab.node(host)["slot"] * 2
    return rank


def moved(lab: Lab, epoch: int, leaver: str) -> str:
    """Why the map of this epoch was made."""
    row = wait_for(f"epoch {epoch}\n{lab.output()}", lambda: next((r for r in lab.history() if r["epoch"] == epoch), None))
    assert (row["cause"], row["leaver"]) == ("failure", leaver), row
    reason: str = row["reason"]
    return reason
