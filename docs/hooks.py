"""Writes the reference of commands and flags from the commands themselves, so that it cannot be out of date."""

from __future__ import annotations

from typing import Any

import click
from mkdocs.structure.files import File, Files

from tmrun.cli import main
from tmrun.core import ledger, story
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import Host


def on_files(files: Files, config: Any) -> Files:
    """MkDocs calls this before it looks at links."""
    files.append(File.generated(config, "reference/cli.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fills in the tables of the JSON page."""
    return markdown.replace("<!-- metrics -->", metrics()).replace("<!-- kinds -->", ", ".join(f"`{k.value}`" for k in story.EventKind))


def reference() -> str:
    """All verbs, arguments and flags as Markdown."""
    root = click.Context(main.cli, info_name="tmrun")
    parts = [f"# Commands and flags\n\n{main.cli.help}\n\n`--a-b` may be written `--a_b`. {main.cli.epilog}\n"]
    for verb in main.cli.list_commands(root):
        command = main.cli.get_command(root, verb)
        assert command is not None
        parts.append(_verb(verb, command, click.Context(command, info_name=verb, parent=root)))
    return "\n".join(parts)


def _verb(verb: str, command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f"## {verb}\n",
        "```text",
        f"tmrun {verb} {usage}",
        "```\n",
        _prose(command.help or ""),
        "",
        "| flag | what it does |",
        "|---|---|",
    ]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            lines.append(f"| `{_cell(record[0])}` | {_cell(record[1])}{_environment(parameter)} |")
    return "\n".join(lines) + "\n"


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _environment(parameter: click.Parameter) -> str:
    names = parameter.envvar
    if not names:
        return ""
    return f" Environment: `{names if isinstance(names, str) else ', '.join(names)}`."


def metrics() -> str:
    """All exported metrics as a Markdown table."""
    job = Job(Keys("job"))
    found = ledger.of_node(ledger.Ledger(), job, Host("node0"), 0.0, store_answers=True) + ledger.of_job(job, 0.0)
    rows = [f"| `{f.name}{'_total' if f.kind == 'counter' else ''}` | {f.kind} | {f.help} |" for f in found]
    return "\n".join(["| metric | kind | |", "|---|---|---|", *rows])
