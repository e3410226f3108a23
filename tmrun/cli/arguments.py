"""How the flags of ``tmrun run`` are read: torchrun's spellings, and the order flag > variable (TMRUN_ or PET_) > --config file > default.

Words up to the script are ours: ``--a_b`` is ``--a-b``, a unique beginning of a flag is the flag. What follows the script is the script's,
whatever it looks like. May not know: what a flag means.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tmrun.core.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Whole(click.types.StringParamType):
    """A text that may hold spaces: a variable gives several of them as lines, not as words."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """One value a line."""
        return [line.strip() for line in rv.splitlines() if line.strip()]


class Flag(click.Option):
    """``ours``: torchrun does not have it, so an abbreviation that torchrun knows never means it."""

    def __init__(self, *args: Any, ours: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ours = ours


def option(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """A flag that also has the variables TMRUN_<NAME> and PET_<NAME>, one for each long spelling."""
    given = settings.pop("envvar", None)
    words = [name[2:].replace("-", "_").upper() for name in names if name.startswith("--")]
    variables = ([given] if given else []) + [f"{prefix}_{word}" for word in words for prefix in ("TMRUN", "PET")]
    return click.option(*names, cls=Flag, envvar=variables, **settings)


class Command(click.Command):
    """See the module's text."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell out, let click parse, and say where a bad value came from."""
        try:
            return super().parse_args(ctx, spelled_out(self, args))
        except click.BadParameter as error:
            origin = "" if error.param is None or isinstance(error, click.MissingParameter) else _origin(ctx, error.param)
            raise UsageError(f"{error.format_message().rstrip('.')}{origin}") if origin else error  # noqa: B904  # one line either way


def _origin(ctx: click.Context, param: click.Parameter) -> str:
    source = ctx.get_parameter_source(param.name or "")
    if source is ParameterSource.ENVIRONMENT:
        names = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
        return f" (from ${next(n for n in names if os.environ.get(n))})"
    return f" (from {ctx.meta.get(_FILE)})" if source is ParameterSource.DEFAULT_MAP else ""


def spelled_out(command: click.Command, args: list[str]) -> list[str]:
    """Full flags up to the script, then ``--``, then the script and its arguments untouched. Raises UsageError."""
    options = {name: p for p in command.params if isinstance(p, click.Option) for name in p.opts}
    options["--help"] = options["-h"] = click.Option(["--help"], is_flag=True)
    done: list[str] = []
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        spelled, needs_value = _long(options, word) if word.startswith("--") else (word, _short_needs_value(options, word))
        done.append(spelled)
        if needs_value and rest:
            done.append(rest.pop(0))
    if rest[:1] == ["--"]:
        rest.pop(0)
    return [*done, "--", *rest] if rest else done


def _long(options: Mapping[str, click.Option], word: str) -> tuple[str, bool]:
    name, equals, value = word.partition("=")
    name = "--" + name[2:].replace("_", "-")
    if name not in options:
        able = {id(p): n for n, p in options.items() if n.startswith(name)}
        theirs = {key: n for key, n in able.items() if not getattr(options[n], "ours", False)}
        able = theirs or able
        if len(able) > 1:
            raise UsageError(f"{word.partition('=')[0]} can mean {', '.join(sorted(able.values()))}; write more of it")
        name = next(iter(able.values()), name)
    known = options.get(name)
    return name + equals + value, known is not None and not known.is_flag and not equals


def _short_needs_value(options: Mapping[str, click.Option], word: str) -> bool:
    """``-mr`` then a value; ``-r3`` has it already."""
    for position, letter in enumerate(word[1:], 1):
        known = options.get(f"-{letter}")
        if known is None or not known.is_flag:
            return known is not None and position == len(word) - 1
    return False


_FILE = "tmrun.config"


def load_file(ctx: click.Context, _param: click.Parameter, path: str | None) -> str | None:
    """Callback of ``--config``: the file's values become the defaults. Raises UsageError."""
    if path is None:
        return None
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None
    ctx.meta[_FILE] = path
    ctx.default_map = dict(_known(ctx.command, path, key, value) for key, value in table.items())
    return path


def _known(command: click.Command, path: str, key: str, value: Any) -> tuple[str, Any]:
    flag = "--" + key.replace("_", "-")
    options = {n: p for p in command.params if isinstance(p, click.Option) for n in p.opts if n != "--config"}
    if flag not in options:
        near = difflib.get_close_matches(flag, options, 1)
        hint = f"; did you mean {near[0][2:]}?" if near else "; keys are the flags' names without --"
        raise UsageError(f"--config {path}: unknown key {key!r}{hint}")
    param = options[flag]
    assert param.name is not None
    return param.name, _plain(value, f"{path}: {key}", several=param.multiple)


def _plain(value: Any, where: str, *, several: bool) -> Any:
    """Lists and tables as they would be typed: ``a,b`` and ``k=v,k=v``; for a flag that may be repeated, a list."""
    if isinstance(value, Mapping):
        value = [f"{k}={v}" for k, v in value.items()]
    if isinstance(value, list):
        if any(isinstance(item, (list, Mapping)) for item in value):
            raise UsageError(f"--config {where}: expected plain values")
        texts = [str(item) for item in value]
        return texts if several else ",".join(texts)
    if isinstance(value, (str, int, float)):
        return [str(value)] if several else value
    raise UsageError(f"--config {where}: expected a text, a number, true or false")
