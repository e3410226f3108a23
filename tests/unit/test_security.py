"""What the source may not do: unpickle, evaluate, run a shell, put a secret where others read it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_lab import ROOT

from tmrun.cli import main
from tmrun.config import AgentConfig, StoreAccess

SOURCES = sorted([*(ROOT / "tmrun").rglob("*.py"), *(ROOT / "agents").rglob("*.py")])
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "xmlrpc"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "torch.load", "torch.save", "subprocess.getoutput"}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_there_is_source_to_look_at() -> None:
    assert len(SOURCES) > 80


def test_nothing_is_unpickled() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path}:{node.lineno}: {n}" for n in names if n.split(".")[0] in UNPICKLERS]  # type: ignore[attr-defined]
    assert found == []


def test_nothing_is_evaluated_and_no_shell_is_run() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                shell = any(k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False) for k in node.keywords)
                if shell or ast.unparse(node.func) in FORBIDDEN_CALLS:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == []


@pytest.mark.parametrize("record", [StoreAccess, AgentConfig])
def test_what_is_written_to_files_holds_no_secret(record: type) -> None:
    names = {name.lower() for name in record.__annotations__}
    assert not [n for n in names if "secret" in n or "password" in n or "token" in n]


def test_no_flag_takes_a_secret_itself() -> None:
    for verb in main._VERBS:
        command = main.cli.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        flags = [o for p in command.params for o in p.opts if any(word in o for word in ("secret", "password", "token"))]
        assert [f for f in flags if not f.endswith("-file")] == [], verb
