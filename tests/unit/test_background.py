"""A launch that goes on in the background: its caller hears why it did not come up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tmrun.cli import background


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
