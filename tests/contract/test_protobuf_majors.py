"""The store layer beside the protobuf that a user's environment happens to have: real etcd, real `tmrun doctor`, in a process of its own.

Each major is installed into a temp folder that comes first on the path. Skipped, and said so, where the package index cannot be reached.
The default run takes the oldest and the newest; `-m chaos` all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tmrun.store.embedded import EmbeddedEtcd

MAJORS = (4, 5, 6, 7)
ROUND_TRIP = """
import sys, threading
import google.protobuf
from tmrun.core.txn import Absent, Put, Txn
from tmrun.store.etcd import EtcdStore
store, told = EtcdStore(sys.argv[1]), threading.Event()
store.watch("/pb/", lambda event: told.set() if getattr(event, "value", None) else None)
lease = store.grant(5)
kept = store.keep_alive(lease, 5, lambda: None)
assert store.commit(Txn((Absent("/pb/a"),), (Put("/pb/a", "1", lease),))).succeeded
assert not store.commit(Txn((Absent("/pb/a"),), (Put("/pb/a", "2", lease),))).succeeded
assert [kv.value for kv in store.list("/pb/").entries] == ["1"]
assert told.wait(20)
store.revoke(lease)
assert store.get("/pb/a") is None
store.close()
print(google.protobuf.__version__)
"""


def installed(major: int, folder: Path) -> Path:
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*argv, f"protobuf=={major}.*"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"protobuf {major} cannot be installed here: {(done.stderr.strip().splitlines() or ['no reason told'])[-1]}")
    return folder


@pytest.mark.chaos
@pytest.mark.parametrize("major", MAJORS)
def test_a_protobuf_of_the_users(
    major: int, shared_etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    if major not in (MAJORS[0], MAJORS[-1]) and "chaos" not in (request.config.getoption("-m") or ""):
        pytest.skip("in full only (-m chaos)")
    folder = installed(major, tmp_path_factory.mktemp("protobuf"))
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, root, root / "agents")))}
    argv = [sys.executable, "-c", ROUND_TRIP, shared_etcd.endpoint]
    trip = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert trip.returncode == 0, trip.stderr
    used = trip.stdout.strip()
    # protobuf 4.21 to 4.25 call themselves 4.x; 7 calls itself 7.x
    assert used.split(".")[0] == str(major), used
    argv = [sys.executable, "-m", "tmrun", "doctor", "--etcd", shared_etcd.endpoint, "-o", "json"]
    doctor = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    grades = {c["code"]: c["grade"] for c in json.loads(doctor.stdout)["checks"]}
    assert grades["ETCD"] == grades["ETCD_AUTH"] == grades["ETCD_DATABASE"] == "ok", doctor.stdout + doctor.stderr
