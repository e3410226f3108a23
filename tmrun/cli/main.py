"""The `tmrun` command: verbs, and how an error becomes one line and an exit code.

``tmrun train.py`` is ``tmrun run train.py``; a word that is a verb is the verb. Exit codes: 0 done, 1 failed, 2 usage, 3 refused by a
safety check, 4 timed out (the operation goes on), 5 outcome unknown, 6 store unreachable, 7 no such job or node.
May not know: what the verbs do.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tmrun import __version__
from tmrun.cli.runtime_dir import runtime_root
from tmrun.core.errors import TmrunError

_VERBS = {
    "run": "run.command",
    "status": "status.command",
    "top": "top.command",
    "nodes": "nodes.command",
    "events": "events.command",
    "history": "history.command",
    "logs": "logs.command",
    "plan": "plan.plan",
    "ok-to-drain": "plan.ok_to_drain",
    "drain": "drain.command",
    "undrain": "undrain.command",
    "cordon": "cordon.cordon",
    "uncordon": "cordon.uncordon",
    "replace": "replace.command",
    "pause": "pause.pause",
    "resume": "pause.resume",
    "stop": "stop.command",
    "chaos": "chaos.command",
    "trace": "trace.command",
    "doctor": "doctor.command",
    "simulate": "simulate.command",
    "size": "size.command",
    "completion": "completion.command",
}
"""Verb -> where its command is."""


class _Verbs(click.Group):
    """Loads a verb's module when it is used, so that ``tmrun drain`` never pays for ``tmrun run``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        from importlib import import_module

        module, _, attribute = _VERBS[name].partition(".")
        command: click.Command = getattr(import_module(f"tmrun.cli.{module}"), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].replace("_", "-") not in _VERBS:
            args = ["run", *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_Verbs,
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 refused, 4 timed out, 5 outcome unknown, 6 store unreachable, 7 not found.",
)
@click.version_option(__version__, "--version", prog_name="tmrun")
def cli() -> None:
    """Launch distributed training that does not restart: a leaving machine's ranks move to a warm standby.

    `tmrun [run] [FLAGS] SCRIPT [ARGS]` launches, with torchrun's flags.
    """


def entry(argv: Sequence[str] | None = None) -> None:
    """Console entry point: errors of ours are one line, never a traceback."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        code: Any = cli.main(argv, prog_name="tmrun", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except TmrunError as error:
        click.echo(f"tmrun: {error}", err=True)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        click.echo(f"tmrun: {error}{_where(error)}", err=True)
        return 1
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        click.echo(f"tmrun: {_one_line(error)}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("tmrun: interrupted", err=True)
        return 130


def _where(error: OSError) -> str:
    """What to change, if it may have been a runtime file that could not be written."""
    try:
        root = runtime_root()
    except TmrunError:
        return ""
    if error.filename is not None and not Path(str(error.filename)).is_relative_to(root):
        return ""
    return f": nothing can be written (runtime files go to {root.parent}, see $TMPDIR)"


def _one_line(error: click.ClickException) -> str:
    """click's message, and where to read more."""
    text = error.format_message().rstrip(".")
    text = text[:1].lower() + text[1:]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{text}; see `{error.ctx.command_path} --help`"
    return text
