"""``python preload.py [-m] script``: import what a script will import, so that its files are in memory when it has to start here.

For standbys of scripts that cannot be rehearsed. Only installed packages are imported: what lies beside the script is read, never run.
Imports the standard library only. May not know: when this is worth it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def imports(source: str, folder: Path, seen: set[Path] | None = None) -> Iterator[str]:
    """Names of the modules that a source imports at its top level, its neighbours' included, without these neighbours themselves."""
    seen = set() if seen is None else seen
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for name in _names(tree):
        own = _neighbour(folder, name)
        if own is None:
            yield name
        elif own not in seen:
            seen.add(own)
            if own.is_file():
                yield from imports(own.read_text(errors="replace"), folder, seen)


def _names(tree: ast.Module) -> Iterator[str]:
    """Also inside ``try`` and ``if``; not inside functions, which may never be called."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _neighbour(folder: Path, name: str) -> Path | None:
    """The file that the name means beside the script; the folder where it is a package without one."""
    path = folder.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    top = folder / name.partition(".")[0]
    return top if top.is_dir() or top.with_suffix(".py").is_file() else None


def main(arguments: list[str]) -> None:
    """Import, and end at once, without the modules' own endings."""
    os.nice(10)
    del sys.path[0]  # our own folder
    if arguments[0] == "-m":
        spec = importlib.util.find_spec(arguments[1])
        script = Path(spec.origin) if spec is not None and spec.origin else Path(os.devnull)
    else:
        script = Path(arguments[0])
    for name in dict.fromkeys(imports(script.read_text(errors="replace"), script.resolve().parent)):
        try:
            importlib.import_module(name)
        except BaseException:  # the script will say it better
            continue
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
