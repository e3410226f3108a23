"""What several verbs share: options, durations, node names as typed, output forms, questions. May not know: what a verb does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from tmrun.cli import jobs
from tmrun.core import hostlist
from tmrun.core.errors import NotFoundError, RefusedError, TmrunError, UsageError
from tmrun.core.membership import Job
from tmrun.core.model import Host
from tmrun.core.states import known_hosts

F = TypeVar("F", bound=Callable[..., Any])
API_VERSION = 1
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MAX_AT_ONCE = 60
"""Nodes that one request can name: each costs guards and writes of one transaction, of which etcd takes 128."""


if TYPE_CHECKING:
    _Float = click.ParamType[float]
else:
    _Float = click.ParamType  # not generic before click 8.2


class Duration(_Float):
    """``90``, ``90s``, ``10m``, ``1.5h`` -> seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds, more than zero."""
        if isinstance(value, (int, float)):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value))
        if found is None or found.group(2) not in _UNITS or float(found.group(1)) <= 0:
            self.fail(f"{value!r} is no duration, write 90s, 10m or 1h", param, ctx)
        return float(found.group(1)) * _UNITS[found.group(2)]


def job_argument(function: F) -> F:
    """[JOB], --job and --etcd."""
    return click.argument("job_id", metavar="[JOB]", required=False)(jobs.job_options(function))


def nodes_argument(function: F) -> F:
    """NODE..., completed with the names of the running job."""
    return click.argument("nodes", metavar="NODE...", nargs=-1, required=True, shell_complete=complete_nodes)(function)


def yes_option(function: F) -> F:
    """-y."""
    return click.option("-y", "--yes", is_flag=True, help="Ask nothing.")(function)


def output_option(*forms: str) -> Callable[[F], F]:
    """-o, the first form being the default."""
    return click.option("-o", "--output", type=click.Choice(forms), default=forms[0], show_default=True, help="Form of the output.")


def complete_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Node names that begin as typed, with their states. Silent about any trouble: this runs at a press of a key."""
    from tmrun.core.states import node_state

    try:
        with jobs.connect(ctx.params.get("job"), ctx.params.get("etcd"), deadline_s=1.0) as connection:
            job = connection.read()
    except TmrunError:
        return []
    named = ctx.params.get("nodes") or ()
    return [
        CompletionItem(str(h), help=node_state(job, h)[0].value) for h in known_hosts(job) if h.startswith(incomplete) and h not in named
    ]


def hosts(job: Job, typed: Sequence[str]) -> tuple[Host, ...]:
    """Names, unique prefixes and hostlists (``node[3-7]``) as typed -> hosts of the job. Raises NotFoundError, UsageError."""
    known = list(known_hosts(job))
    chosen: dict[Host, None] = {}
    for name in (n for text in typed for n in hostlist.expand(text)):
        matching = [h for h in known if h == name] or [h for h in known if h.startswith(name)]
        if len(matching) > 1:
            raise UsageError(f"{name!r} could be {_named(matching)} of job {job.keys.job}: write more of the name")
        if not matching:
            raise NotFoundError(f"no node {name!r} in job {job.keys.job}; nodes: {_named(known)}")
        chosen[matching[0]] = None
    if len(chosen) > MAX_AT_ONCE:
        raise UsageError(f"{len(chosen)} nodes at once are too many for one request (at most {MAX_AT_ONCE}); do it in parts")
    return tuple(chosen)


def _named(names: Sequence[Host]) -> str:
    if len(names) <= 10:
        return ", ".join(names) or "none"
    return hostlist.compress(names)


def emit(value: Mapping[str, Any], form: str) -> None:
    """Print as JSON or YAML; ``api_version`` first."""
    whole = {"api_version": API_VERSION, **value}
    click.echo(json.dumps(whole, indent=2) if form == "json" else "\n".join(_yaml(whole, "")))


def _yaml(value: Any, indent: str) -> list[str]:
    """Plain JSON values as block YAML; strings are quoted as in JSON, which YAML understands."""
    lines: list[str] = []
    pairs = value.items() if isinstance(value, Mapping) else [(None, v) for v in value]
    for key, item in pairs:
        mark = "-" if key is None else f"{_key(str(key))}:"
        if isinstance(item, (Mapping, list, tuple)) and item:
            inner = _yaml(item, indent + "  ")
            lines += [f"{indent}- {inner[0].lstrip()}", *inner[1:]] if key is None else [f"{indent}{mark}", *inner]
        else:
            empty = {} if isinstance(item, Mapping) else item
            lines.append(f"{indent}{mark} {json.dumps(empty)}")
    return lines


_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def _key(text: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text)


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; without one ``-y`` is needed. Raises UsageError, and RefusedError for a no."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{question} not asked, because this is no terminal: give -y to say yes")
    _ask(question)


def _ask(question: str) -> None:
    if not click.confirm(question, err=True):
        raise RefusedError("nothing was changed")


def confirm_on_terminal(question: str, yes: bool) -> None:
    """Ask on a terminal; a script is taken at its word. Raises RefusedError for a no."""
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        _ask(question)
