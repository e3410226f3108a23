"""A launch that goes on in the background: its caller hears why it did not come up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tmrun.cli import background
from tmrun.core.errors import UsageError


def test_why_it_failed_is_told_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmrun-night.log").write_text("of an earlier launch\n")
    assert background.detach("night", ["run", "--nnodes", "x", "train.py"]) == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and told.startswith("tmrun: ") and "of an earlier launch" not in told
    assert told in (tmp_path / "tmrun-night.log").read_text()


def test_who_goes_on_does_not_detach_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert background.behind() == ""
    monkeypatch.setenv(background.ENV_BEHIND, "night")
    assert background.behind() == "night"


def test_where_its_output_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started; a folder that is only to be read fails in the same way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmrun-night.log").mkdir()
    with pytest.raises(UsageError, match=r"its output cannot go to \./tmrun-night\.log \(Is a directory\); start it from another folder"):
        background.detach("night", ["run", "train.py"])
