"""The C++ switch: compiled once, cached, loaded by name; and how a process group uses it.

build()   compiles csrc/shim.cpp (about a minute) unless the cache has it; ``python -m tmrun.worker.shim`` does the same. It belongs
          before a job or beside one, never into a training process: several may call it, a file lock lets one compile. The launcher
          starts it in the background (``cli.switch``).
load()    the compiled module, or None when the cache does not have it: then the process uses the slot.

Beside the slot it has no limit of switches, frees old communicators, hides a lost connection from the body of a step, lets go who waits
for an operation that cannot end, and knows which groups were idle when a rank was lost. What torch itself registered for a group, its
first communicator, stays registered as long as the group lives: one for each living group, whatever the number of switches.
From torch 2.14 on a Backend can be subclassed in Python, which would need no compiler. May not know: steps, migrations, the agent.
"""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tmrun.core.errors import WorkerError
from tmrun.worker import bootstrap, comm, shim_cache
from tmrun.worker.comm import Communicator, Kinds
from tmrun.worker.groups import select, take_place

_FIRST_TYPE = 16


def load() -> Any | None:
    """The compiled module if the cache has it; compiles nothing."""
    if shim_cache.NAME in sys.modules:
        return sys.modules[shim_cache.NAME]
    path = shim_cache.path()
    if not path.exists():
        return None
    try:
        sys.modules[shim_cache.NAME] = _open(path)
    except ImportError:  # compiled for another machine
        return None
    return sys.modules[shim_cache.NAME]


def _open(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(shim_cache.NAME, str(path))
    spec = importlib.util.spec_from_file_location(shim_cache.NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build() -> Path:
    """Compile unless it is cached. Raises WorkerError, one line, when that cannot be done."""
    path = shim_cache.path()
    if path.exists():
        return path
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise WorkerError(f"the C++ switch cannot be built: there is no compiler {compiler}; process groups are switched in Python")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in path.parent.glob("build-*"):  # of a build that was killed
            shutil.rmtree(stale, ignore_errors=True)
        if not path.exists():
            _compile(compiler, path)
    return path


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as work:
        made = Path(work) / path.name
        done = subprocess.run(
            _command(compiler, made), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        log = path.with_suffix(".log")
        try:
            if not done.returncode:
                _open(made)
        except ImportError as error:
            done.returncode, done.stdout = 1, f"{done.stdout}{error}\n"
        if done.returncode:
            log.write_text(done.stdout)
            raise WorkerError(f"the C++ switch did not compile, process groups are switched in Python; the compiler's output: {log}")
        log.unlink(missing_ok=True)
        made.replace(path)


def _command(compiler: str, target: Path) -> list[str]:
    from torch.utils import cpp_extension  # slow to import

    include = [f"-I{folder}" for folder in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    library = [flag for folder in cpp_extension.library_paths() for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    names = ["-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={shim_cache.NAME}", abi]
    flags = ["-std=c++20", "-fPIC", "-shared", *shim_cache.FLAGS, *names, *include]
    return [compiler, *flags, str(shim_cache.SOURCE), "-o", str(target), *library, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


class ShimSwitch:
    """One group's: a shim for each of its backends is registered once and forwards to whatever was installed last."""

    room = 1 << 30

    def __init__(self, module: Any, pg: dist.ProcessGroup, kinds: Kinds, *, fake: bool) -> None:
        self._module, self._pg, self._kinds, self._fake = module, pg, kinds, fake
        self._parts = comm.parts_of(kinds)
        self._shims = [module.Shim(pg.rank(), pg.size(), kind.NAME, kind.QUEUED) for kind, _ in self._parts]
        self._was_pairwise = False
        if not fake:
            for shim, (_, devices) in zip(self._shims, self._parts, strict=True):
                shim.swap(pg._get_backend(torch.device(devices[0])))
        self._select()

    def _select(self) -> None:
        for number, (shim, (_, devices)) in enumerate(zip(self._shims, self._parts, strict=True)):
            select(self._pg, devices, dist.ProcessGroup.BackendType(_FIRST_TYPE + number), shim)

    def install(self, backends: Mapping[str, Any]) -> None:
        """Use these, by device type, from the next collective on."""
        self._was_pairwise = self.pairwise
        if self._fake:
            take_place(self._pg, self._kinds, backends)
            self._select()
            self._fake = False
        for shim, (_, devices) in zip(self._shims, self._parts, strict=True):
            shim.swap(backends[devices[0]])

    def poison(self) -> None:
        """All groups of the process, until ``fail(False)``."""
        self._module.fail(True)

    def close(self, reason: str) -> None:
        """Refuse every further collective, from C++ too."""
        for shim in self._shims:
            shim.close(reason)

    def release(self) -> None:
        """Free replaced communicators, without holding the GIL."""
        for shim in self._shims:
            shim.release()

    def complete(self) -> None:
        """What was started on a queued backend has run."""
        for shim in self._shims:
            shim.complete()

    @property
    def idle(self) -> tuple[int, ...] | None:
        """Collectives started, if all completed and nothing went point to point."""
        counts = [shim.counts() for shim in self._shims]
        done = all(each["completed"] == each["started"] and not each["failed"] and not each["p2p"] for each in counts)
        return tuple(each["started"] for each in counts) if done else None

    @property
    def settled(self) -> bool:
        """Whether no collective is under way."""
        return all(each["completed"] + each["failed"] >= each["started"] for each in (shim.counts() for shim in self._shims))

    @property
    def pairwise(self) -> bool:
        """Whether anything ever went point to point, outside a batch, where that makes a difference."""
        queued = [shim for shim, (kind, _) in zip(self._shims, self._parts, strict=True) if kind.QUEUED]
        return self._was_pairwise or any(shim.counts()["pairwise"] for shim in queued)

    @property
    def started(self) -> int:
        """Collectives started."""
        return sum(int(shim.counts()["started"]) for shim in self._shims)

    @property
    def called(self) -> int:
        """Operations of any kind, of a rehearsal too."""
        return sum(int(shim.counts()["called"]) for shim in self._shims)


class ShimSwitching:
    """This process's way of switching."""

    name = "shim"
    needs_stand_in = False

    def __init__(self, module: Any) -> None:
        self._module = module
        module.signs(list(comm.SIGNS))

    def new(self, pg: dist.ProcessGroup, kinds: Kinds, *, fake: bool) -> ShimSwitch:
        """A group's switch."""
        return ShimSwitch(self._module, pg, kinds, fake=fake)

    @property
    def failing(self) -> bool:
        """Whether collectives inside a step are no-ops."""
        return bool(self._module.failing())

    @property
    def first_error(self) -> str:
        """The first hidden error."""
        return str(self._module.first_error())

    @property
    def hidden(self) -> int:
        """Operations that a step did without."""
        return int(self._module.hidden())

    def own(self, communicator: Communicator) -> Communicator:
        """Behind a shim that hides nothing."""
        inner: Any = communicator.backend
        shim = self._module.Shim(inner.rank(), inner.size(), own=True)
        shim.swap(inner)
        return replace(communicator, backends=dict.fromkeys(communicator.backends, shim))

    def rehearse(self, on: bool) -> None:
        """Collectives have no peers."""
        self._module.rehearse(on)

    def arm(self, on: bool) -> None:
        """A step's block is open."""
        self._module.arm(on)

    def fail(self, on: bool) -> None:
        """A rank was lost, or all is well again."""
        self._module.fail(on)

    def abandon(self) -> None:
        """Let go whoever waits for an operation that cannot end."""
        self._module.abandon()


def _beside() -> None:
    """For the launcher's child: give way to training, end with the launcher."""
    os.nice(19)
    bootstrap.die_with_parent()


if __name__ == "__main__":
    beside = sys.argv[1:2] == ["--beside"]
    if beside:
        _beside()
    try:
        built = build()
    except WorkerError as error:
        sys.exit(f"tmrun: {error}")
    if not beside:
        print(built)
