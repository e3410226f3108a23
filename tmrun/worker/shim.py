"""The C++ switch: compiled once, cached, loaded by name; and how a process group uses it.

    build()   compiles csrc/shim.cpp (about a minute) unless the cache has it; ``python -m tmrun.worker.shim`` does the same. It belongs
              before a job or beside one, never into a training process: several may call it, a file lock lets one compile.
    load()    the compiled module, or None when the cache does not have it: then the process uses the slot.

The cache is ``$XDG_CACHE_HOME/tmrun/shim`` (or ``~/.cache/...``), one folder for each version of torch, C++ ABI, Python and source.
Beside the slot it has no limit of switches, frees old communicators, hides a lost connection from the body of a step, and knows which
groups were idle when a rank was lost. From torch 2.14 on a Backend can be subclassed in Python, which would need no compiler.
May not know: steps, migrations, the agent.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tmrun.core.errors import WorkerError
from tmrun.worker import comm
from tmrun.worker.groups import select

_SOURCE = Path(__file__).with_name("csrc") / "shim.cpp"
_NAME = "tmrun_shim"
_GLOO = dist.ProcessGroup.BackendType.GLOO
_TYPE = dist.ProcessGroup.BackendType(16)
_FLAGS = ["-O1", "-g0", "-fvisibility=hidden"]


def cached() -> Path:
    """Where the compiled module of this torch, Python and source is or will be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    abi = f"abi{int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    tag = hashlib.sha256(_SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:16]
    folder = f"torch{torch.__version__}-{abi}-{sysconfig.get_config_var('SOABI')}-{tag}"
    return root / "tmrun" / "shim" / folder / f"{_NAME}.so"


def load() -> Any | None:
    """The compiled module if the cache has it; compiles nothing."""
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    path = cached()
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=importlib.machinery.ExtensionFileLoader(_NAME, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def build() -> Path:
    """Compile unless it is cached. Raises WorkerError, one line, when that cannot be done."""
    path = cached()
    if path.exists():
        return path
    compiler = os.environ.get("CXX", "c++")
    for tool, what in ((compiler, "a C++ compiler"), ("ninja", "ninja")):
        if shutil.which(tool) is None:
            raise WorkerError(f"the C++ switch cannot be built: {what} ({tool}) is not installed; tmrun works without, see TMRUN_SWITCH")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as work:
        done = subprocess.run(
            [sys.executable, "-m", "tmrun.worker.shim", "--into", work],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            log = path.with_suffix(".log")
            log.write_text(done.stdout)
            raise WorkerError(f"the C++ switch did not compile; tmrun works without, see TMRUN_SWITCH. The compiler's output: {log}")
        (Path(work) / f"{_NAME}.so").replace(path)


def _compile_into(work: str) -> None:
    from torch.utils.cpp_extension import load as compile_and_load

    compile_and_load(_NAME, [str(_SOURCE)], extra_cflags=_FLAGS, build_directory=work, with_cuda=False, verbose=True)


class ShimSwitch:
    """One group's: the shim is registered once and forwards to whatever was installed last."""

    room = 1 << 30

    def __init__(self, module: Any, pg: dist.ProcessGroup, *, fake: bool) -> None:
        self._module, self._pg, self._fake = module, pg, fake
        self._shim = module.Shim(pg.rank(), pg.size())
        if not fake:
            self._shim.swap(pg._get_backend(torch.device("cpu")))
        select(pg, _TYPE, self._shim)

    def install(self, backend: object) -> None:
        """Use this backend from the next collective on."""
        if self._fake:  # DDP looks into the GLOO slot; what is put there first is never released
            select(self._pg, _GLOO, backend)
            self._pg._set_default_backend(_GLOO)
            select(self._pg, _TYPE, self._shim)
            self._fake = False
        self._shim.swap(backend)

    def poison(self) -> None:
        """All groups of the process, until ``fail(False)``."""
        self._module.fail(True)

    def close(self, reason: str) -> None:
        """Refuse every further collective, from C++ too."""
        self._shim.close(reason)

    def release(self) -> None:
        """Free replaced communicators, without holding the GIL."""
        self._shim.release()

    @property
    def idle(self) -> int | None:
        """Collectives started, if all completed and nothing went point to point."""
        started, completed, failed, p2p = self._shim.counts()
        return started if completed == started and not failed and not p2p else None

    @property
    def settled(self) -> bool:
        """Whether no collective is under way."""
        started, completed, failed, _ = self._shim.counts()
        return bool(completed + failed >= started)


class ShimSwitching:
    """This process's way of switching."""

    name = "shim"
    needs_stand_in = False

    def __init__(self, module: Any) -> None:
        self._module = module
        module.signs(list(comm.SIGNS))

    def new(self, pg: dist.ProcessGroup, *, fake: bool) -> ShimSwitch:
        """A group's switch."""
        return ShimSwitch(self._module, pg, fake=fake)

    @property
    def failing(self) -> bool:
        """Whether collectives inside a step are no-ops."""
        return bool(self._module.failing())

    @property
    def first_error(self) -> str:
        """The first hidden error."""
        return str(self._module.first_error())

    def rehearse(self, on: bool) -> None:
        """Collectives have no peers."""
        self._module.rehearse(on)

    def arm(self, on: bool) -> None:
        """A step's block is open."""
        self._module.arm(on)

    def fail(self, on: bool) -> None:
        """A rank was lost, or all is well again."""
        self._module.fail(on)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--into"]:
        _compile_into(sys.argv[2])
    else:
        try:
            print(build())
        except WorkerError as error:
            sys.exit(str(error))
