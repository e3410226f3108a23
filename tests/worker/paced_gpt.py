"""examples/gpt_ddp.py (or another example, named by TEST_SCRIPT), unchanged, but slower, and with faults on request.

Each step takes TEST_PACE_S seconds more, by chance up to TEST_NOISE (a share of it) more or less, until the file TEST_FAST exists.
TMRUN_TEST_KILL may name a death in forward or backward, TMRUN_TEST_HALFWAY one in the update (``halfway``). When the file TEST_CUT appears,
the rank that it names breaks all its TCP connections, once. When the file TEST_FAULT appears ("RANK KIND"), that rank removes it and does
in its next forward pass what KIND says (``_FAULTS``). While the file TEST_SLOW exists ("NODE SECONDS"), that node's ranks compute so much
longer in every step; while the file TEST_SLOW_REHEARSAL exists, a rehearsed step takes 2 s of CPU more. With TEST_EXTRA=1 every step has
one more collective, before optimizer.step(); with TEST_TAIL=1 one after it, before the scheduler steps. TEST_BETWEEN names communication
after every step's block, where a rank may die at the point ``between``. At the end every rank writes a hash of its part of the parameters
into the folder TEST_HASHES. TEST_ON_ROLE: ``none`` for a script without that callback, ``forgets`` for one that does nothing, ``sampler``
for one that leaves out a sampler inside of a loader, ``world`` where the script holds the default group. TEST_BACKEND: instead of gloo;
NCCL is a stand-in (``fake_nccl``).
"""

from __future__ import annotations

import hashlib
import os
import runpy
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import halfway
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import tmrun
from tmrun.worker import api, faults
from tmrun.worker.state import local

_PACE_S = float(os.environ.get("TEST_PACE_S", "0.02"))
_NOISE = float(os.environ.get("TEST_NOISE", "0"))
_dice = Random(os.getpid())  # not the program's own, whose state is moved
_FAST = Path(os.environ.get("TEST_FAST", "/nonexistent"))
_ON_ROLE: dict[str, Any] = {"none": {"on_role": None}, "forgets": {"on_role": lambda rank: None}}.get(
    os.environ.get("TEST_ON_ROLE", ""), {}
)
_SLOW_REHEARSAL = Path(os.environ.get("TEST_SLOW_REHEARSAL", "/nonexistent"))
_joined: dict[str, Any] = {}
_FAULT = Path(os.environ.get("TEST_FAULT", "/nonexistent"))
_SLOW = Path(os.environ.get("TEST_SLOW", "/nonexistent"))
_CUT = Path(os.environ.get("TEST_CUT", "/nonexistent"))


def _cut_connections() -> None:
    """As a broken link would: both ends of every connection see an error, nobody dies."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family == socket.AF_INET and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def _burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _save() -> None:
    checkpoint.save({"model": _joined["model"].state_dict()}, checkpoint_id=Path("checkpoint"))


_BETWEEN: dict[str, Any] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "functional": lambda: functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).sum(),
    "object": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
    "new_group": lambda: dist.destroy_process_group(dist.new_group()),
    "save": _save,
}


def _communicate_between(run: tmrun.Run, what: str, fault: Any) -> None:
    plain = run.steps

    def steps(total: int) -> Iterator[tmrun.Step]:
        for step in plain(total):
            yield step
            if fault is not None:
                fault(int(step), "between")
            _BETWEEN[what]()

    run.steps = steps  # type: ignore[method-assign]


def _loop() -> None:
    while True:
        pass


def _raise() -> None:
    raise RuntimeError("injected by the test")


_skip = [False]
_FAULTS: dict[str, Callable[[], object]] = {
    "loop": _loop,
    "gil": lambda: sum(range(1 << 60)),  # one call in C that never lets go of the GIL, and that no signal ends
    "skip": lambda: _skip.__setitem__(0, True),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(3600),
    "exit": lambda: os._exit(3),
    "raise": _raise,
    "print": lambda: print("x" * (1 << 16)),
    "memory": lambda: [bytearray(b"x") * (1 << 24) for _ in range(1 << 12)],
}


def _fault() -> None:
    try:
        rank, kind = _FAULT.read_text().split()
    except (OSError, ValueError):
        return
    if rank == os.environ["RANK"]:
        _FAULT.unlink()
        _FAULTS[kind]()


def _cut() -> None:
    if _CUT.exists() and _CUT.read_text() == os.environ["RANK"]:
        _CUT.unlink()
        _cut_connections()


def _slow() -> None:
    try:
        node, seconds = _SLOW.read_text().split()
    except (OSError, ValueError):
        return
    if node == Path(os.environ.get("TMRUN_AGENT_SOCKET", "")).stem:
        time.sleep(float(seconds))


def _communicate_before_the_update(run: tmrun.Run) -> None:
    plain_clip = torch.nn.utils.clip_grad_norm_

    def clip(*args: Any, **kwargs: Any) -> Any:
        if not run.rehearsing and not _skip[0]:
            dist.all_reduce(torch.ones(1))
        return plain_clip(*args, **kwargs)

    torch.nn.utils.clip_grad_norm_ = clip


def _communicate_in_tail(scheduler: Any) -> None:
    plain_step = scheduler.step

    def step(self: Any) -> None:
        dist.all_reduce(torch.ones(1))
        dist.all_gather_object([None] * dist.get_world_size(), dist.get_rank())
        plain_step(self)

    scheduler.step = step


def _communicate_more(run: tmrun.Run, scheduler: Any, fault: Any) -> None:
    if between := os.environ.get("TEST_BETWEEN"):
        _communicate_between(run, between, fault)
    if os.environ.get("TEST_EXTRA"):
        _communicate_before_the_update(run)
    if os.environ.get("TEST_TAIL"):
        _communicate_in_tail(scheduler)


def _hold_ranks(registered: dict[str, Any]) -> None:
    if os.environ.get("TEST_ON_ROLE") == "sampler":
        sampler: Any = DistributedSampler(range(64), num_replicas=dist.get_world_size(), rank=dist.get_rank())  # type: ignore[arg-type]
        registered["data"] = tmrun.Batches(DataLoader(range(64), sampler=sampler))  # type: ignore[arg-type]
    if os.environ.get("TEST_ON_ROLE") == "world":
        _joined["group"] = dist.group.WORLD


def _join(**registered: Any) -> tmrun.Run:
    _hold_ranks(registered)
    run = api.join(**{**registered, **_ON_ROLE})
    halfway.install()
    calls = iter(range(1 << 30))
    fault = None if run.rehearsing else faults.from_environment(int(os.environ["RANK"]))
    current = [0]

    def forward(*_: Any) -> None:
        current[0] = next(calls)
        if not run.rehearsing and not _FAST.exists():
            time.sleep(_PACE_S * _dice.uniform(1 - _NOISE, 1 + _NOISE))
        if run.rehearsing and _SLOW_REHEARSAL.exists():
            _burn(2.0)
        if fault is not None:
            fault(current[0], "forward")
        if not run.rehearsing:
            _fault()
            _slow()
            _cut()

    registered["model"].register_forward_pre_hook(forward)
    _joined.update(registered)
    _communicate_more(run, type(registered.get("schedule")), fault)
    if fault is not None:
        middle = list(registered["model"].parameters())[6]

        def backward(_: Any) -> None:
            fault(current[0], "backward")

        middle.register_post_accumulate_grad_hook(backward)
    return run


def _use_backend(name: str) -> None:
    import fake_nccl

    fake_nccl.install(name)
    plain = dist.init_process_group
    dist.init_process_group = lambda _gloo, **kwargs: plain(name, **kwargs)


tmrun.join = _join
if backend := os.environ.get("TEST_BACKEND"):
    _use_backend(backend)
_SCRIPT = os.environ.get("TEST_SCRIPT", "gpt_ddp.py")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / _SCRIPT), run_name="__main__")
if "TEST_HASHES" in os.environ:
    digest = hashlib.sha256()
    for parameter in _joined["model"].parameters():
        digest.update(local(parameter).contiguous().numpy().tobytes())
    (Path(os.environ["TEST_HASHES"]) / os.environ["RANK"]).write_text(digest.hexdigest())
