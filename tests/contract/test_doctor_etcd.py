"""``tmrun doctor`` on a real etcd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tmrun.cli.main import run
from tmrun.store.embedded import EmbeddedEtcd
from tmrun.store.endpoints import TlsFiles
from tmrun.store.secret import issue


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


def grades(capsys: pytest.CaptureFixture[str], etcd: str) -> dict[str, tuple[str, str]]:
    """code -> (grade, what) of the checks of a store."""
    run(["doctor", "--etcd", etcd, "-o", "json"])
    return {c["code"]: (c["grade"], f"{c['what']}; {c['advice']}") for c in json.loads(capsys.readouterr().out)["checks"]}


@pytest.mark.parametrize(
    ("user", "password", "grade", "says"),
    [
        ("root", "secret", "ok", "authentication is on; user 'root' may read and write"),
        ("root", "wrong", "bad", "refused the login"),
        ("reader", "weak", "bad", "grant the user read and write below /tmrun/"),
        ("", "", "bad", "set TMRUN_ETCD_USER and TMRUN_ETCD_PASSWORD"),
    ],
)
def test_an_etcd_with_users(
    guarded_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], user: str, password: str, grade: str,
    says: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("TMRUN_ETCD_USER", user)
    monkeypatch.setenv("TMRUN_ETCD_PASSWORD", password)
    found = grades(capsys, guarded_etcd.endpoint)
    told = next(found[code] for code in ("ETCD_AUTH", "ETCD_PERMISSION", "ETCD_LOGIN") if code in found)
    assert (told[0], says in told[1]) == (grade, True), told


def test_an_etcd_with_mutual_tls(certificates: TlsFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedEtcd(tls=certificates) as etcd:
        assert "ETCD_UNREACHABLE" in grades(capsys, etcd.url), "without files"
        for name, path in (("CACERT", certificates.ca), ("CERT", certificates.cert), ("KEY", certificates.key)):
            monkeypatch.setenv(f"TMRUN_ETCD_{name}", str(path))
        found = grades(capsys, etcd.url)
        assert {found[c][0] for c in ("ETCD", "ETCD_AUTH", "ETCD_DATABASE")} == {"ok"}, found
        assert found["TLS_EXPIRY"][0] == "warn" and "expires in" in found["TLS_EXPIRY"][1]  # they are made for two days


def test_an_etcd_that_the_jobs_secret_guards(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with EmbeddedEtcd(tls=issue("0123456789abcdef-doctor", tmp_path / "tls", ["127.0.0.1"])) as etcd:
        monkeypatch.setenv("TMRUN_SECRET", "0123456789abcdef-doctor")
        found = grades(capsys, etcd.endpoint)
        assert {found[c][0] for c in ("ETCD", "ETCD_AUTH")} == {"ok"}, found
        monkeypatch.setenv("TMRUN_SECRET", "0123456789abcdef-another")
        assert "ETCD_UNREACHABLE" in grades(capsys, etcd.endpoint), "another secret"
