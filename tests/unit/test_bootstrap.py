"""A script that never imports tmrun cannot tell the bootstrap from Python."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tmrun_agent.processes import _BOOTSTRAP

from tmrun.worker import bootstrap
from tmrun.worker.current import HOLDER

BODY = """
import atexit, os, pickle, sys, threading, time
class Thing: pass
def late():
    time.sleep(0.2)
    print("thread", pickle.loads(pickle.dumps(Thing())).__class__.__module__, sys.modules["__main__"] is not None)
atexit.register(print, "atexit")
threading.Thread(target=late).start()
print(__name__, __spec__ is None, __package__, os.path.basename(__file__), os.path.isabs(__file__), sys.argv[1:], sys.path[0])
print([m for m in sys.modules if m.startswith("tmrun")], annotations if "annotations" in globals() else None)
"""
SCRIPTS = {
    "ends well": BODY,
    "exits with a number": BODY + "sys.exit(7)",
    "exits with words": "import sys; sys.exit('words')",
    "raises": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('outer') from e",
    "cannot be parsed": "x = (",
    "was interrupted": "raise KeyboardInterrupt",
    "spawns itself": (
        "import multiprocessing as mp, sys\n"
        "def work(): sys.exit(5)\n"
        "if __name__ == '__main__':\n"
        "    p = mp.get_context('spawn').Process(target=work); p.start(); p.join(); print(p.exitcode)\n"
    ),
    "is not utf-8": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
}


def both(folder: Path, *arguments: str, **env: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) under Python and under the bootstrap."""
    answers = []
    for how in ([sys.executable, "-u"], [sys.executable, "-u", _BOOTSTRAP]):
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("TMRUN_", "TORCHELASTIC_"))} | env
        done = subprocess.run([*how, *arguments], cwd=folder, env=outer, text=True, capture_output=True, timeout=60, check=False)
        answers.append((done.returncode, done.stdout, done.stderr))
    return answers


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script(tmp_path: Path, case: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[case], encoding="latin-1")
    python, ours = both(tmp_path, "script.py", "-m", "--", "a")
    if case == "was interrupted":
        python = (130, python[1], python[2])  # Python dies of the signal, which a shell shows as 130
    assert ours == python


@pytest.mark.parametrize("how", ["folder", "zip", "module", "package", "no module"])
def test_other_programs(tmp_path: Path, how: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (package / name).write_text(BODY if name == "__main__.py" else "")
    (tmp_path / "alone.py").write_text(BODY)
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
        archive.writestr("__main__.py", BODY)
    words = {
        "folder": ("package",),
        "zip": ("job.zip",),
        "module": ("-m", "alone"),
        "package": ("-m", "package"),
        "no module": ("-m", "nope"),
    }
    python, ours = both(tmp_path, *words[how], "a")
    assert ours == python


def test_the_error_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('mine')")
    both(tmp_path, "script.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: mine"
    assert message["extraInfo"]["py_callstack"].splitlines()[-1] == "ValueError: mine"
    assert re.fullmatch(r"\d+", message["extraInfo"]["timestamp"])
    (tmp_path / "error.json").write_text("written by @record")
    both(tmp_path, "script.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert (tmp_path / "error.json").read_text() == "written by @record"


def test_a_program_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\necho program $1; exit 3\n")
    (tmp_path / "job.sh").chmod(0o755)
    run = [sys.executable, _BOOTSTRAP, "--exec"]
    done = subprocess.run([*run, "./job.sh", "x"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "program x\n")
    done = subprocess.run([*run, "./nothing"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (127, "tmrun: cannot execute './nothing': No such file or directory\n")


WHERE = "import os, sys\nprint(sorted(os.sched_getaffinity(0)), 'TMRUN_WORKER_PID' in os.environ)"
WRAPPER = '#!/bin/sh\n{} "$@"\nexit $?\n'


@pytest.mark.parametrize("how", ["", "--exec"])
def test_on_the_cpus_that_are_near_its_gpu(tmp_path: Path, how: str) -> None:
    cpu = max(os.sched_getaffinity(0))
    (tmp_path / "script.py").write_text(WHERE)
    target = [how, sys.executable, "script.py"] if how else ["script.py"]
    run = [sys.executable, _BOOTSTRAP, *target]
    env = {**os.environ, "TMRUN_CPUS": str(cpu)}
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"[{cpu}] {not how}\n", done.stderr


def test_an_interpreter_that_is_a_process_below_the_one_that_was_started(tmp_path: Path) -> None:
    """As a PYTHON_EXEC that forgets ``exec``: scripts run, but nothing can be moved; an agent that is gone ends it still."""
    (tmp_path / "script.py").write_text(WHERE)
    wrapper = tmp_path / "python"
    wrapper.write_text(WRAPPER.format(sys.executable))
    wrapper.chmod(0o755)

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "TMRUN_PARENT_PID": str(os.getpid()), **more}
        argv = [str(wrapper), "-u", _BOOTSTRAP, "script.py"]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)

    done = run()
    assert (done.returncode, done.stdout) == (0, f"{sorted(os.sched_getaffinity(0))} False\n")
    assert "$PYTHON_EXEC starts Python as a process below itself" in done.stderr
    assert run(TMRUN_LOCAL_RANK="1").stderr == ""
    standby = run(TMRUN_WORKER_ROLE="standby")
    assert (standby.returncode, standby.stdout) == (1, "")
    assert "a standby needs `exec` in it" in standby.stderr
    gone = run(TMRUN_PARENT_PID=str(2**22 + 1))
    assert (gone.returncode, gone.stdout) == (1, "")


def taking_part(monkeypatch: pytest.MonkeyPatch) -> tuple[Warm, list[Any]]:
    """This process becomes a worker that is activated; and what its scripts find as ``seen``."""
    warm, seen = Warm(), list[Any]()
    monkeypatch.setattr(builtins, "seen", seen, raising=False)
    monkeypatch.setattr(bootstrap, "die_with_parent", lambda: None)
    monkeypatch.setattr(HOLDER, "runtime", warm)
    monkeypatch.setattr(bootstrap, "_end", sys.exit)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("TMRUN_WORKER_PID", "")
    return warm, seen


def test_a_script_that_changed_its_folder_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to name it are relative to where it was started."""
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "class Again(BaseException): tmrun_restart_as = 1\n"
        "seen.append((os.getcwd(), sys.argv))\n"
        "os.chdir('/')\n"
        "raise Again() if len(seen) == 1 else SystemExit(3)\n"
    )
    warm, seen = taking_part(monkeypatch)
    for command in (["script.py", "data"], ["-m", "script", "data"]):
        monkeypatch.delitem(sys.modules, "script", raising=False)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as end:
            bootstrap.main(command)
        assert end.value.code == 3
        assert [folder for folder, _ in seen] == [str(tmp_path)] * 2
        seen.clear()
    assert warm.became == [1, 1]


@pytest.mark.parametrize("how", ["raise ValueError('as another role')", "raise SystemExit(7)", "pass"])
def test_a_script_that_ends_as_another_role_is_run_as_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """And leaves nothing that could be taken for the end of a rank."""
    told = tmp_path / "error.json"
    (tmp_path / "script.py").write_text(f"seen.append(1)\nif len(seen) > 1: raise SystemExit(3)\nopen({str(told)!r}, 'w').close()\n{how}\n")
    warm, _ = taking_part(monkeypatch)
    warm.homes = [4]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        bootstrap.main(["script.py"])
    assert (end.value.code, warm.became, told.exists()) == (3, [4], False)


class Warm:
    """The runtime of a process that takes part."""

    def way_back(self) -> int | None:
        return self.homes.pop() if self.homes else None

    def __init__(self) -> None:
        self.homes: list[int] = []
        self.became: list[int] = []

    def become(self, rank: int) -> None:
        self.became.append(rank)


@pytest.mark.parametrize("how", ["script", "module"])
def test_from_a_folder_that_was_deleted(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    program = [str(tmp_path / "script.py")] if how == "script" else ["-m", "script"]
    begin = ["sh", "-c", 'mkdir gone && cd gone && rmdir "$PWD" && exec "$@"', "sh", sys.executable]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TMRUN_")} | {"PYTHONPATH": str(tmp_path)}
    for before in ([], [_BOOTSTRAP]):
        done = subprocess.run(
            [*begin, *before, *program, "a"], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "['a']\n", "")


def test_a_script_is_run_again_though_its_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = Warm()
    monkeypatch.setattr(HOLDER, "runtime", warm)
    monkeypatch.chdir(tmp_path)
    for began_in in (str(tmp_path / "gone"), ""):
        bootstrap._again(1, began_in)
    assert warm.became == [1, 1]
    assert Path.cwd() == tmp_path
