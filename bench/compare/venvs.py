"""A virtual environment a peer, made from the package registry when it is not there; says why when it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tmrun import __version__

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
PACKAGES: dict[str, tuple[str, ...]] = {
    "tmrun": (),  # the interpreter that runs the bench: it has tmrun's tree and stock torch
    "nvrx": ("torch", "numpy", "setuptools", "nvidia-resiliency-ext"),
    "torchft": ("torch", "numpy", "torchft-nightly"),
}
PROBES = {"tmrun": "torch", "nvrx": "nvidia_resiliency_ext.inprocess", "torchft": "torchft"}
"""A venv that cannot import this is no use."""
_SHOWN = ("torch", "nvidia-resiliency-ext", "torchft-nightly")
_INSTALL_S = 1200.0


@dataclass(frozen=True, slots=True)
class Venv:
    """``python`` is empty when there is none, ``why`` then says so in one line."""

    python: str
    versions: dict[str, str]
    why: str = ""


def provide(name: str, folder: Path) -> Venv:
    """Use what is there, else make it."""
    python = Path(sys.executable) if not PACKAGES[name] else folder / name / "bin" / "python"
    if not python.exists():
        why = _make(folder / name, PACKAGES[name])
        if why:
            return Venv("", {}, why)
    probe = subprocess.run([str(python), "-c", f"import {PROBES[name]}"], capture_output=True, text=True, check=False, cwd="/")
    if probe.returncode:
        return Venv("", {}, _reason(probe.stderr))
    versions = _versions(python)
    return Venv(str(python), {**versions, "tmrun": _tree()} if name == "tmrun" else versions)


def _tree() -> str:
    """Which tmrun this is: its version and, in a clone, the commit."""
    argv = ["git", "describe", "--always"]
    commit = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=CONSTRAINTS.parent).stdout.strip()
    return f"{__version__}+{commit}" if commit else __version__


def _make(folder: Path, packages: tuple[str, ...]) -> str:
    """Why it failed; empty when it did not."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
    for argv in ([sys.executable, "-m", "venv", str(folder)], [*pip, *packages]):
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            return f"the installation took longer than {_INSTALL_S:.0f} s"
        if done.returncode:
            (folder / "bin" / "python").unlink(missing_ok=True)  # so that the next run tries again
            return _reason(done.stderr or done.stdout)
    return ""


def _versions(python: Path) -> dict[str, str]:
    code = "import json, importlib.metadata as m; print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, cwd="/")
    versions: dict[str, str] = json.loads(found.stdout)
    return {name: versions[name] for name in _SHOWN if name in versions}


def _reason(text: str) -> str:
    """pip's first error, or the last line of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines[-1:] or ["unknown"])[0][:200]
