"""What only a machine can do to a worker: its disk is full, its memory is used up. The ranks move, the program is not blamed.

Skipped, and said so, where the machine does not allow it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, Lab, Oracle, frozen, wait_for
from machine import Denied, enter, fill, give, new_cgroup, remove, small_disk
from test_hangs import inject
from test_training_goes_on import assert_exact

from tmrun.store.embedded import EmbeddedEtcd

HOSTS = ("alpha", "beta", "gamma", "delta")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with ExitStack() as mounted:
        try:
            found = mounted.enter_context(small_disk(tmp_path, "256k"))
        except Denied as error:
            pytest.skip(str(error))
        yield found


@pytest.fixture
def cgroups() -> Iterator[dict[str, Path]]:
    groups: dict[str, Path] = {}
    try:
        for host in HOSTS:
            groups[host] = new_cgroup(f"tmrun-test-{os.getpid()}-{host}")
        yield groups
    except Denied as error:
        pytest.skip(str(error))
    finally:
        for group in groups.values():
            remove(group)


@pytest.mark.parametrize("away_s", [0.0, 6.0], ids=["", "store away"])
def test_a_full_disk_then_no_memory(cgroups: dict[str, Path], disk: Path, lab: Lab, oracle: Oracle, tmp_path: Path, away_s: float) -> None:
    """Also with a store that is frozen from just before each fault on, for longer than a lease lives."""
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--standby", "2", "--job", "machines", "--lease-ttl", "4")
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        os.environ |= (where := {"TMRUN_ETCD": etcd.url, "TMRUN_JOB": "machines"})
        try:
            for host in HOSTS:
                logs = ("--redirects", "1", "--log-dir", str(disk)) if host == "alpha" else ()
                more = ("--etcd", etcd.url, "--node-name", host, "--node-rank", str(HOSTS.index(host)), *logs)
                number = lab.launch(*flags, *more, TEST_FAULT=str(lab.folder / "fault"))
                enter(cgroups[host], [lab.launches[number].pid])
            strike(lab, cgroups, disk, lambda: frozen([etcd.pid], away_s))
            lab.go_fast()
            assert [launch.wait(DEADLINE_S) for launch in lab.launches] == [0, 0, 0, 0]
        finally:
            for name in where:
                del os.environ[name]
    assert_exact(lab, oracle, 0, 1, 2, 3, may_miss=2)


@pytest.mark.parametrize("pages", [2, 3])
def test_no_room_for_what_runs(disk: Path, lab: Lab, tmp_path: Path, pages: int) -> None:
    """For the agent's own files, for those of its workers: said in words. Who writes into a page without room on the disk is killed."""
    fill(disk)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - pages * os.sysconf("SC_PAGESIZE"))
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        answer = lab.cli("--etcd", etcd.url, "--job", "full", "--no-python", "true", TMPDIR=str(disk))
    assert answer.returncode == 1
    what = {2: "the agent of", 3: "its workers cannot be started: "}[pages]
    assert any(what in line and "No space left on device" in line for line in answer.stderr.splitlines()), answer.stderr
    assert "Traceback" not in answer.stderr


def strike(lab: Lab, cgroups: dict[str, Path], disk: Path, store_away: Callable[[], AbstractContextManager[None]]) -> None:
    """A disk that is full ends whoever writes on it; a worker that grows is ended by the kernel."""
    lab.wait_warm(2)
    fill(disk)
    rank = seat(lab, "alpha")
    with store_away():
        inject(lab, rank, "print")
    assert "a disk of this host is full or fails" in moved(lab, 2, "alpha")
    lab.wait_warm(1)
    victim = next(n["name"] for n in lab.status()["nodes"] if n["role"] == "active" and n["name"] != "beta")
    rank = seat(lab, victim)
    with store_away():
        give(cgroups[victim], 200)
        inject(lab, rank, "memory")
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
