"""The documentation is true: it builds, its commands parse, its files and names exist, its messages are really in the code."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
from documented import DOCS, PAGES, ROOT, blocks, commands

from tmrun.cli import main, run
from tmrun.core import conditions, details, report
from tmrun.core.heard import Heard
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import Host

SOURCES = sorted([*(ROOT / "tmrun").rglob("*.py"), *(ROOT / "agents").rglob("*.py")])
OTHERS = {
    "pip", "curl", "export", "eval", "kill", "sbatch", "kubectl", "make", "python", "openssl", "(umask",
}  # fmt: skip
"""First words of commands that are not tmrun's."""


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    page = (tmp_path / "site" / "reference" / "cli" / "index.html").read_text()
    for verb in main._VERBS:
        assert f'id="{verb}"' in page, f"{verb} is missing in the reference"
    assert "tmrun_goodput_ratio" in (tmp_path / "site" / "reference" / "json" / "index.html").read_text()


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())), ids=lambda value: value[:60])
def test_every_command_parses(page: str, line: str) -> None:
    for part in re.split(r"&&|\|\|", line):
        words = [w for w in shlex.split(part) if not re.fullmatch(r"[A-Z]+=.*", w)]
        if not words or words[0] != "tmrun":
            assert not words or words[0] in OTHERS or Path(ROOT / words[0]).is_file(), f"{page}: what is {part!r}?"
            continue
        _parse(words[1:])


def _parse(words: list[str]) -> None:
    """As `tmrun` would, but nothing is run."""
    context = click.Context(main.cli, info_name="tmrun", token_normalize_func=lambda t: t.replace("_", "-"))
    words = main.cli.parse_args(context, list(words)) or words
    name, command, rest = main.cli.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None and name is not None
    command.make_context(name, rest, parent=context)


def test_every_file_that_is_named_exists() -> None:
    for page in PAGES:
        for path in re.findall(
            r"\b((?:configs|examples|docs|tests|bench)/[\w@./-]+\.(?:py|sh|sbatch|yaml|jsonl?|service|toml|md))\b", page.read_text()
        ):
            assert path.startswith("bench/results/") or (ROOT / path).is_file(), f"{page.name} names {path}"


@pytest.mark.parametrize(("page", "text"), blocks("python"), ids=lambda value: value[:30])
def test_every_python_block_is_python_and_uses_what_there_is(page: str, text: str) -> None:
    import tmrun

    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tmrun":
            assert node.attr in tmrun.__all__, f"{page}: tmrun.{node.attr}"


def _constants() -> list[str]:
    """Every piece of text in the source; neighbouring literals are one piece."""
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_message_of_troubleshooting_is_in_the_code() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    assert len(messages) == text.count("\n### "), "every heading is a message"
    constants = _constants()
    for message in messages:
        for piece in (p.strip() for p in message.split("…")):
            assert any(piece in c for c in constants), f"no message says {piece!r}"


def test_every_variable_is_documented_and_every_documented_one_exists() -> None:
    """Names that are tmrun's own need not be told, but have to be listed here."""
    internal = {
        "TMRUN_AGENT_SOCKET", "TMRUN_BEACON", "TMRUN_COMPLETE", "TMRUN_EPOCH", "TMRUN_GENERATION", "TMRUN_GROUP", "TMRUN_MARKER",
        "TMRUN_NODE_MARKER", "TMRUN_LOCAL_RANK", "TMRUN_CPUS", "TMRUN_PARENT_PID", "TMRUN_REHEARSAL_LOG", "TMRUN_TEST_KILL",
        "TMRUN_TEST_RETIRE_S", "TMRUN_BEHIND", "TMRUN_ETCD_", "TMRUN_ETCD",
        "TMRUN_WORKER_PID", "TMRUN_WORKER_ROLE",
    }  # fmt: skip
    used = {name for path in SOURCES for name in re.findall(r"TMRUN_[A-Z_]*[A-Z]", path.read_text())}
    used |= {f"TMRUN_ETCD_{name}" for name in ("USER", "CACERT", "CERT", "KEY")}
    told = set(re.findall(r"TMRUN_[A-Z_]*[A-Z]", (DOCS / "reference" / "environment.md").read_text()))
    internal |= {name for name in used if name.startswith("TMRUN_TEST_")}
    assert used - told - internal == set(), "tell it in docs/reference/environment.md"
    anywhere = {name for page in PAGES for name in re.findall(r"TMRUN_[A-Z_]*[A-Z]\b", page.read_text())}
    flags = {name for param in run.command.params for name in param.envvar or ()}
    assert anywhere - used - flags - {"TMRUN_FLAGS", "TMRUN_SCRIPT"} == set(), "no such variable"


def test_every_json_field_is_documented() -> None:
    text = (DOCS / "reference" / "json.md").read_text()
    job = Job(Keys("job"))
    fields = {*report.status(job, Heard()), *report.node_row(job, Host("a")), *details.node(job, Host("a"), None, 0.0)} - {"name"}
    missing = [f for f in sorted(fields) if f"`{f}`" not in text and f != "api_version"]
    assert missing == [], "tell it in docs/reference/json.md"


def test_every_check_and_exit_code_is_explained() -> None:
    text = (DOCS / "operating.md").read_text()
    for code in conditions.WHAT_TO_DO:
        assert f"`{code}`" in text, f"docs/operating.md does not explain {code}"
    for code in range(8):
        assert f"\n| {code} | " in text
