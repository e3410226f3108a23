"""``tmrun doctor`` on a real etcd."""

from __future__ import annotations

import json

import pytest

from tmrun.cli.main import run
from tmrun.store.embedded import EmbeddedEtcd


def test_a_store_of_our_own_is_well(shared_etcd: EmbeddedEtcd, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--etcd", shared_etcd.endpoint, "-o", "json"])
    value = json.loads(capsys.readouterr().out)
    grades = {c["code"]: c["grade"] for c in value["checks"]}
    wanted = {"ETCD", "ETCD_MEMBERS", "ETCD_AUTH", "LATENCY_PUT", "LATENCY_TRANSACTION", "LATENCY_KEEP_ALIVE", "ETCD_DATABASE", "CLOCKS"}
    assert wanted | {"ADDRESS", "INTERFACE", "HOSTNAME", "OPEN_FILES", "TORCH", "COMPILER", "SHM"} <= set(grades)
    assert (value["api_version"], value["store"]) == (1, shared_etcd.endpoint)
    assert {grades[c] for c in ("ETCD", "ETCD_MEMBERS", "ETCD_AUTH", "ETCD_DATABASE", "ADDRESS", "INTERFACE")} == {"ok"}
    database = next(c["what"] for c in value["checks"] if c["code"] == "ETCD_DATABASE")
    assert "of 2048 MiB" in database  # etcd's default quota, as its metrics tell it
    assert code == {"ok": 0, "warn": 1, "bad": 2}[max(grades.values(), key=["ok", "warn", "bad"].index)]


def test_nothing_listens_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--etcd", "127.0.0.1:1"]) == 2
    out = capsys.readouterr().out
    assert "BAD  ETCD_UNREACHABLE: etcd at 127.0.0.1:1" in out
    assert "ok   TORCH" in out
