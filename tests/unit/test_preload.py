"""What a standby reads ahead for a script that it cannot rehearse."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tmrun_agent import preload

from tmrun.worker.preload import imports

SCRIPT = """
import json, os.path as path, mine
from package.part import thing
from . import nothing
try:
    import fast
except ImportError:
    fast = None
def main():
    import never
class Late:
    import early
"""


def test_imports_of_a_script_and_of_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("import torch.nn, mine")
    (tmp_path / "mine.py").write_text("import mine, csv\n(")
    assert list(imports(SCRIPT, tmp_path)) == ["json", "os.path", "torch.nn", "fast", "early"], "mine.py cannot be parsed"
    (tmp_path / "mine.py").write_text("import mine, csv")
    assert list(imports(SCRIPT, tmp_path)) == ["json", "os.path", "csv", "torch.nn", "fast", "early"]
    assert list(imports("(", tmp_path)) == []


def test_it_waits_and_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("open('ran', 'w')")
    script = tmp_path / "train.py"
    script.write_text("import beside, this_writes\nopen('ran', 'w')")
    library = tmp_path / "library"
    library.mkdir()
    (library / "this_writes.py").write_text("open('imported', 'a').write('x')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    ahead = preload.Preload((str(script),))
    for now in (0.0, preload.AFTER_S - 1):
        ahead.tend(True, now)
    ahead.tend(False, preload.AFTER_S)
    ahead.tend(True, preload.AFTER_S + 1)
    assert ahead._process is None, "it was needed meanwhile"
    for now in (2 * preload.AFTER_S + 1, 3 * preload.AFTER_S):
        ahead.tend(True, now)
    assert ahead._process is not None
    assert ahead._process.wait(60) == 0
    for now in (4 * preload.AFTER_S, 9 * preload.AFTER_S):
        ahead.tend(True, now)
    ahead.close()
    assert (tmp_path / "imported").read_text() == "x"
    assert not (tmp_path / "ran").exists(), "neither the script nor what lies beside it may run"


def test_a_missing_module_is_the_scripts_to_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import no_such_module_here")
    began = time.monotonic()
    assert subprocess.run([sys.executable, preload._PRELOAD, str(script)], capture_output=True, check=False, timeout=60).stderr == b""
    assert time.monotonic() - began < 60
