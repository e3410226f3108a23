"""Runtime folders: one private folder a launch, which its sweeper removes; if that was killed too, the next launch on this machine does.

The launcher holds a lock on a file in its folder for as long as it lives, so a folder whose lock is free belongs to nobody.
May not know: what is in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tmrun.core.errors import UsageError
from tmrun.core.keys import name_of

_LOCK = f".lock-{socket.gethostname()}"
"""Only of this host: a lock may be unknown to others that share the folder."""


def runtime_root() -> Path:
    """Folder of all runtime folders of this user. Raises UsageError."""
    try:
        return Path(tempfile.gettempdir()) / f"tmrun-{os.getuid()}"
    except FileNotFoundError as error:
        raise UsageError(f"nothing can be written ({error.strerror}); set TMPDIR to a folder with some room") from None


def make_runtime_dir(job: str, stack: ExitStack) -> Path:
    """A fresh private folder for one launch, held until ``stack`` closes. Raises UsageError."""
    root = runtime_root()
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise UsageError(f"{root} belongs to somebody else; set TMPDIR to a folder of your own")
    for other in root.iterdir():
        _remove_if_left(other)
    folder = Path(tempfile.mkdtemp(prefix=f"{name_of(job)[:16]}.", dir=root))
    draft = folder / f"{_LOCK}.new"
    lock = stack.enter_context(draft.open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return folder  # no locks here: nobody will remove it but its sweeper
    draft.rename(folder / _LOCK)  # nobody sees it before it is held
    return folder


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # held, or not made yet
    shutil.rmtree(folder, ignore_errors=True)
