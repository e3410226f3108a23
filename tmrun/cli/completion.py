"""``tmrun completion``: what makes a shell complete verbs, flags and node names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_HINT = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/completions/tmrun.fish"}


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(sorted(_HINT)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script for SHELL. bash and zsh: eval "$(tmrun completion bash)"; fish: tmrun completion fish | source."""
    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(ctx.find_root().command, {}, "tmrun", "_TMRUN_COMPLETE").source())
