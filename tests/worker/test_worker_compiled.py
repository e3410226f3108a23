"""Compiled code travels between hosts, if the job wants it to."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from cluster import DEADLINE_S
from trials import Trials

from tmrun import wire
from tmrun.worker import compiled, values


def own(folder: Path) -> dict[str, str]:
    """The environment of a host with its own cache, and a compiler that says what it is told."""
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {folder}/log\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }


def kernels(folder: Path) -> int:
    """How many were compiled there."""
    return (folder / "log").read_text().count(".main.cpp ")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile for the CPU needs g++")
def test_a_standby_on_another_host(trials: Trials, tmp_path: Path) -> None:
    job = trials.make("flat", TEST_COMPILE="1", TEST_PACE_S="0.2", TMRUN_SHARE_COMPILED="1", **own(tmp_path / "first"))
    job.nursery = None  # Inductor starts processes of its own, which a forked one cannot
    job.start(at_once=True)
    job.agent.wait(lambda: any(key.startswith("compiled/") and key.endswith("/chunks") for key in job.agent._store), DEADLINE_S, "a share")
    joiner = job.standby(1, **own(tmp_path / "second"))
    assert job.expect(joiner, wire.Warm).rehearsal.compiled > 0
    assert kernels(tmp_path / "first") > kernels(tmp_path / "second") == 0


# -- what is read -------------------------------------------------------------------------------------------------------------------
class Store:
    """In memory."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.kept[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def add(self, key: str, amount: int) -> int:
        self.set(key, str(int(self.kept.get(key, b"0")) + amount))
        return int(self.kept[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.kept.setdefault(key, desired.encode())

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.kept.keys()

    def dispose(self) -> None:
        pass


def share(number: int, libraries: dict[str, bytes], store: Store, chunk: int = 1 << 10) -> None:
    body = zlib.compress(values.encode({"artefacts": b"", "libraries": libraries}))
    prefix = f"compiled/{compiled.likeness()}"
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    for place, part in enumerate(chunks):
        store.set(f"{prefix}/{number}/{place}", part)
    store.set(f"{prefix}/{number}/chunks", str(len(chunks)))
    store.set(f"{prefix}/begun", str(number + 1))  # one more has begun, and is not complete


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def take(store: Store) -> int:
    return compiled.take(lambda: store)  # type: ignore[arg-type, return-value]


def test_libraries_are_put_where_they_are_looked_for(cache: Path) -> None:
    store, body = Store(), os.urandom(5000)
    assert take(store) == 0 and not cache.exists()
    share(1, {"ab/cabx.main.so": body}, store)
    (cache / "ab").mkdir(parents=True)
    (cache / "ab" / "own.so").write_bytes(b"ours")
    share(2, {"ab/own.so": b"theirs", "cd/ccdx.main.so": b"x"}, store)
    assert take(store) == 2
    assert (cache / "ab" / "cabx.main.so").read_bytes() == body and (cache / "cd" / "ccdx.main.so").read_bytes() == b"x"
    assert (cache / "ab" / "own.so").read_bytes() == b"ours"
    assert not [p for p in cache.rglob("*") if p.is_file() and p.suffix != ".so"]


def given(store: Store, monkeypatch: pytest.MonkeyPatch, artefacts: bytes, libraries: list[Path], role: str) -> str:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (artefacts, None))
    monkeypatch.setattr(compiled, "loaded", lambda: libraries)
    return compiled._write(store, f"compiled/{compiled.likeness()}", role)  # type: ignore[arg-type]


def test_one_rank_of_each_role_gives(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, library, loaded = Store(), cache / "ab" / "cabx.main.so", []
    library.parent.mkdir(parents=True)
    library.write_bytes(os.urandom(2 << 20))
    body = library.read_bytes()
    for role, artefacts in (("one", b"a"), ("one", b"b"), ("two", b"c")):
        assert given(store, monkeypatch, artefacts, [library], role) == ""
    library.unlink()
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    assert take(store) == 2 and loaded == [b"a", b"c"]
    assert library.read_bytes() == body
    assert max(len(value) for value in store.kept.values()) < 1 << 20, "etcd takes no more in one request"


def test_the_store_is_no_file_server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shares together have a limit."""
    store = Store()
    monkeypatch.setattr(compiled, "_MOST_BYTES", 3 << 20)
    assert given(store, monkeypatch, os.urandom(2 << 20), [], "one") == ""
    told = given(store, monkeypatch, os.urandom(2 << 20), [], "two")
    assert told.startswith("not shared: 4 MB are more than 3; let all hosts share a folder")
    assert given(store, monkeypatch, b"small", [], "three") == "", "what was refused does not count"
    assert sum(map(len, store.kept.values())) < 3 << 20


@pytest.mark.parametrize("name", ["../x.so", "/etc/x.so", "ab/../../x.so", "ab/x.py", "ab/x.so/y"])
def test_nothing_is_written_elsewhere(cache: Path, name: str) -> None:
    store = Store()
    share(1, {name: b"x"}, store)
    assert take(store) == 0 and not [*cache.parent.rglob("x*")]


def test_what_torch_does_not_take(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiling remains."""

    def refuse(body: bytes) -> None:
        raise AssertionError("artefacts of another setting")

    store = Store()
    given(store, monkeypatch, b"a", [], "one")
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", refuse)
    assert take(store) == 0
    assert capsys.readouterr().err == "tmrun: compiled code not taken: AssertionError: artefacts of another setting\n"


@pytest.mark.parametrize("body", [b"no zlib", zlib.compress(b"no value"), b""])
def test_what_cannot_be_read_is_as_if_it_were_not_there(cache: Path, body: bytes) -> None:
    store = Store()
    share(1, {}, store)
    store.set(f"compiled/{compiled.likeness()}/1/0", body)
    assert take(store) == 0
