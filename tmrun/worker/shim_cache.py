"""Where the compiled C++ switch is kept: ``$XDG_CACHE_HOME/tmrun/shim`` (or ``~/.cache/...``), one folder a torch, Python and source.

Does not import torch, so that a launcher can look without paying for it. May not know: how it is compiled, what it does.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from importlib import metadata
from pathlib import Path

SOURCE = Path(__file__).with_name("csrc") / "shim.cpp"
NAME = "tmrun_shim"
FLAGS = ["-O1", "-g0", "-fvisibility=hidden"]
ENV_SWITCH = "TMRUN_SWITCH"
"""Which switch to use; see ``groups.choose``."""


def path() -> Path:
    """Where the compiled module of this torch, Python and source is or will be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    tag = hashlib.sha256(SOURCE.read_bytes() + repr(FLAGS).encode()).hexdigest()[:16]
    folder = f"torch{metadata.version('torch')}-{sysconfig.get_config_var('SOABI')}-{tag}"
    return root / "tmrun" / "shim" / folder / f"{NAME}.so"
