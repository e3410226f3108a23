"""An embedded etcd is started again as long as that helps."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tmrun.cli.own_store import _MAX_RESTARTS, _ROW_S, OwnStore
from tmrun.config import StoreAccess
from tmrun.core.errors import StoreError, UsageError
from tmrun.store.embedded import EmbeddedEtcd, find_binary


class Mortal:
    """Ends whenever it is looked at."""

    def __init__(self) -> None:
        self.starts = 0

    def exit_code(self) -> int:
        return 137

    def restart(self) -> None:
        self.starts += 1


def test_ends_count_only_together() -> None:
    etcd, now = Mortal(), [0.0]
    own = OwnStore(StoreAccess("http://e:1"), [cast(EmbeddedEtcd, etcd)], clock=lambda: now[0])
    for _ in range(10 * _MAX_RESTARTS):
        assert "training goes on" in own.tend()
        now[0] += _ROW_S / _MAX_RESTARTS
    assert etcd.starts == 10 * _MAX_RESTARTS
    with pytest.raises(StoreError, match=f"ended {_MAX_RESTARTS + 1} times in 300 s, last with exit code 137; it is given up"):
        for _ in range(_MAX_RESTARTS + 1):
            own.tend()
            now[0] += 1


def test_the_program_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a variable of its own: ``TMRUN_ETCD`` is the flag ``--etcd``."""
    program = tmp_path / "etcd"
    monkeypatch.setenv("TMRUN_ETCD_BINARY", str(program))
    with pytest.raises(UsageError, match=r"no etcd program at .*: check the path, or \$TMRUN_ETCD_BINARY"):
        find_binary()
    program.write_text("#!/bin/sh")
    program.chmod(0o755)
    monkeypatch.setenv("TMRUN_ETCD", "http://elsewhere:2379")
    assert find_binary() == program
