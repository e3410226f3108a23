"""Runtime folders: a launch keeps its own, and removes those of launches that are no more."""

from __future__ import annotations

import errno
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tmrun.cli import jobs, main, runtime_dir
from tmrun.cli.place import free_name
from tmrun.cli.runtime_dir import make_runtime_dir


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runtime_dir, "runtime_root", lambda: tmp_path / "root")
    return tmp_path / "root"


def test_only_what_nobody_holds_is_removed(root: Path) -> None:
    with ExitStack() as lives:
        held = make_runtime_dir("job", lives)
        with ExitStack() as killed:
            left = make_runtime_dir("job", killed)
            (left / "etcd").mkdir()
            (left / "etcd" / "data").touch()
        just_made = root / "job.beginning"
        just_made.mkdir()
        with ExitStack() as stack:
            fresh = make_runtime_dir("job", stack)
            assert sorted(root.iterdir()) == sorted([held, just_made, fresh])


def test_a_launch_of_any_id_on_a_host_of_any_name(root: Path) -> None:
    job = "team/run 7:" + "x" * 180
    with ExitStack() as stack:
        folder = make_runtime_dir(job, stack)
        assert folder.parent == root
        assert free_name(job, "h" * 64, stack) == "h" * 64
        assert free_name(job, "h" * 64, stack) == "h" * 64 + "-1", "another launcher has it"
        assert free_name("another", "h" * 64, stack) == "h" * 64


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_nowhere_to_write(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python looks for a temporary folder with some room; none, or one that fills up: one line."""
    monkeypatch.setattr(jobs, "local_jobs", full)
    assert main.run(["status"]) == 1
    line = f"tmrun: [Errno 28] No space left on device: nothing can be written (runtime files go to {tempfile.gettempdir()}, see $TMPDIR)\n"
    assert capsys.readouterr().err == line
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", no_folder)
    assert main.run(["status"]) == 2
    assert capsys.readouterr().err == "tmrun: nothing can be written (no usable folder); set TMPDIR to a folder with some room\n"


@pytest.mark.parametrize("own", [True, False])
def test_what_could_not_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: bool) -> None:
    """$TMPDIR is spoken of if it is what runtime files are in, and exists."""
    monkeypatch.undo()
    path = f"{runtime_dir.runtime_root() if own else '/elsewhere'}/file"

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(jobs, "local_jobs", read_only)
    line = f"tmrun: [Errno 30] Read-only file system: '{path}'"
    hint = f": nothing can be written (runtime files go to {tempfile.gettempdir()}, see $TMPDIR)"
    assert main.run(["status"]) == 1
    assert capsys.readouterr().err == f"{line}{hint if own else ''}\n"
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", no_folder)
    assert main.run(["status"]) == 1
    assert capsys.readouterr().err == f"{line}\n"


def no_folder(*_: object) -> str:
    raise FileNotFoundError(errno.ENOENT, "no usable folder")
