"""What torch.compile made on live ranks, for workers on other hosts: a standby then loads it instead of compiling.

With TMRUN_SHARE_COMPILED=1 only: this is code (torch's cache artefacts are pickles), and it travels in the job's store, so whoever can
write there could run anything in a worker. A live rank writes its share when it has settled: torch's own artefacts
(``torch.compiler.save_cache_artifacts``: graphs, kernels of Triton, choices of autotuning) and, which those leave out, the libraries made
for the CPU that this process has loaded from Inductor's folder, and those by which Inductor finds out what the CPU can do. A worker puts
all there is into its own caches before its script runs. Only between processes that say the same of themselves (``likeness``): compiled
code fits one kind of machine. One rank of each role writes.
May not know: who compiles what, or whether a cache is used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.worker import bulk, coverage
from tmrun.worker.agent_store import AgentStore

_MOST_BYTES = 64 << 20
"""Of all shares, compressed: the job's store keeps everything in memory, and stops at its quota."""
_LARGEST = 1 << 30
"""Of one share when it is unpacked."""
_LIBRARY = re.compile(r"[a-z0-9]{2}/[A-Za-z0-9_.]+\.so")
_PREFIX = "compiled"
_ENV_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_PROBES = 64


def shared() -> bool:
    """Whether the job wants it."""
    return os.environ.get(wire.ENV_SHARE_COMPILED) == "1"


def likeness() -> str:
    """What has to be the same for compiled code to fit: versions, kind of CPU and of GPU."""
    said = [platform.machine(), platform.python_version(), torch.__version__, str(torch.version.cuda), _cpu()]
    for card in Path("/proc/driver/nvidia/gpus").glob("*/information"):  # asking CUDA would make a context
        said += sorted(line for line in card.read_text().splitlines() if line.startswith("Model:"))[:1]
    return hashlib.blake2b("\n".join(said).encode(), digest_size=8).hexdigest()


def _cpu() -> str:
    """What it can do; compilers are told to make use of all of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


# -- giving -------------------------------------------------------------------------------------------------------------------------
def give(open_store: Callable[[], AgentStore], role: str) -> None:
    """In the background: write our share, unless a rank of the same role has, or nothing was compiled."""
    if not coverage.graphs():
        return

    def write() -> None:
        try:
            store = open_store()
            try:
                told = _write(store, f"{_PREFIX}/{likeness()}", role)
            finally:
                store.dispose()
        except Exception as error:  # training goes on
            told = f"not shared: {type(error).__name__}: {error}"
        if told:
            print(f"tmrun: compiled code {told}", file=sys.stderr, flush=True)

    threading.Thread(target=write, name="tmrun-compiled", daemon=True).start()


def _write(store: AgentStore, prefix: str, role: str) -> str:
    """What went wrong; empty when nothing did, or another rank has given."""
    if store.check([f"{prefix}/by/{role}"]):
        return ""
    body, me = _share(), secrets.token_hex(8)
    if store.compare_set(f"{prefix}/by/{role}", "", me) != me.encode():
        return ""
    if (size := store.add(f"{_PREFIX}/bytes", len(body))) > _MOST_BYTES:
        store.add(f"{_PREFIX}/bytes", -len(body))
        return f"not shared: {size >> 20} MB are more than {_MOST_BYTES >> 20}; let all hosts share a folder as TORCHINDUCTOR_CACHE_DIR"
    bulk.put(store, f"{prefix}/{store.add(f'{prefix}/begun', 1)}", body)
    return ""


def _share() -> bytes:
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:  # else lists change under torch while it reads them
        saved = torch.compiler.save_cache_artifacts()
    libraries = {str(path.relative_to(_folder())): path.read_bytes() for path in {*loaded(), *probes()}}
    return bulk.pack({"artefacts": saved[0] if saved else b"", "libraries": libraries}, level=1)


def probes() -> list[Path]:
    """What Inductor compiled to find out what this CPU can do: a host without them compiles them first."""
    found = [path for path in _folder().glob("[a-z0-9][a-z0-9]/*.so") if not path.name.endswith(".main.so")]
    return sorted(found, key=lambda path: path.stat().st_mtime)[-_PROBES:]


def loaded() -> list[Path]:
    """Libraries of Inductor's folder that this process uses."""
    folder = _folder()
    lines = Path("/proc/self/maps").read_text().splitlines()
    named = {Path(line.split(maxsplit=5)[5]) for line in lines if line.endswith(".so")}
    return sorted(p for p in named if p.is_relative_to(folder) and _LIBRARY.fullmatch(str(p.relative_to(folder))))


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    before, folder = os.environ.get(_ENV_FOLDER), Path(cache_dir()).resolve()
    if before is None:  # the script may still choose
        os.environ.pop(_ENV_FOLDER, None)
    return folder


# -- taking -------------------------------------------------------------------------------------------------------------------------
def take(open_store: Callable[[], AgentStore]) -> int:
    """Put what live ranks have shared into this host's caches. Returns how many shares; what cannot be read is as if it were not there."""
    try:
        store = open_store()
        try:
            shares = _read(store, f"{_PREFIX}/{likeness()}")
            for share in shares:
                _put(share)
            return len(shares)
        finally:
            store.dispose()
    except Exception as error:  # whatever torch or a file system finds wrong: compiling remains
        print(f"tmrun: compiled code not taken: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 0


def forget() -> None:
    """Before the script runs again: what torch learned of its shapes would make it compile other code than a new process does."""
    if "torch._dynamo" in sys.modules:
        try:
            torch.compiler.reset()
        except Exception as error:  # a thread of the script compiles just now
            print(f"tmrun: torch.compile keeps what it learned: {error}", file=sys.stderr, flush=True)


def _read(store: AgentStore, prefix: str) -> list[dict[str, Any]]:
    """Those that are complete; nothing is waited for."""
    begun = int(store.get(f"{prefix}/begun")) if store.check([f"{prefix}/begun"]) else 0
    keys = [f"{prefix}/{number}" for number in range(1, begun + 1)]
    return [bulk.get(store, key, _LARGEST) for key in keys if store.check([bulk.complete(key)])]


def _put(share: dict[str, Any]) -> None:
    for name, body in share["libraries"].items():
        if not _LIBRARY.fullmatch(name):
            raise WorkerError(f"{name} is no library of Inductor's")
        _write_file(_folder() / name, body)
    if share["artefacts"]:
        torch.compiler.load_cache_artifacts(share["artefacts"])


def _write_file(path: Path, body: bytes) -> None:
    """At once or not at all: others may look for it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(body)
    Path(file.name).chmod(0o755)
    Path(file.name).rename(path)
