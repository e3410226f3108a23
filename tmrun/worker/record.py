"""What collectives gave in a job's first step: recorded once by live ranks, replayed to the standbys that rehearse.

TrainMover's record and replay (OSDI 2026, section 4): values steer control flow (a flag that all ranks agree on, a list of files, a
norm that is compared), so a rehearsal on made-up ones may take another path, or fail an assertion. A call is known by its phase (before
the loop, in a step), the group in order of first use, its name, and how many like it came before; so a rank of the same role finds the
same calls under the same names, though its groups are others. Every rehearsed step replays the first one.

    recorded    outputs of ``torch.distributed``'s collectives and of the functional ones, called eagerly, that this process waited for;
                objects, if they are plain values (``values``): nothing is ever unpickled here
    in part     tensors larger than TMRUN_RECORD_BYTES: their beginning, which is repeated. They steer nothing, but values out of the air
                (zeros, the rank's own, old memory) end in NaN and failed assertions: see docs/standbys.md
    not         DDP's gradients and what is compiled; calls that torch collects and makes at once later (a batch of sends and receives
                over NCCL, a coalesced reduction), for their outputs come when nobody listens: synthesised (``sandbox``)

After the first step the recorder is gone. Tapes go to the job's store: those of the ranks that standbys rehearse first, and for each role
(ranks whose state looks alike) the one of the first rank that finds the role's key free. Every rank says which role it has.
May not know: migrations, what a script does with a value.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.worker import bulk, values
from tmrun.worker.agent_store import AgentStore
from tmrun.worker.state import Layout

_LARGEST = 1 << 16
_SAMPLE = 1 << 12
_TAPE_BYTES = 2 << 20
"""Of one tape, before compression."""
_CALLS = 10_000
"""After so many a recorder has had enough, whether a step was done or not: a script that never joins must not pay for ever."""

OUTPUT_OF = {
    "all_reduce": "tensor", "reduce": "tensor", "broadcast": "tensor", "scatter": "tensor", "recv": "tensor", "irecv": "tensor",
    "all_gather": "tensor_list", "all_gather_into_tensor": "output_tensor", "all_gather_single": "output_tensor", "gather": "gather_list",
    "reduce_scatter": "output", "reduce_scatter_tensor": "output", "reduce_scatter_single": "output",
    "all_to_all": "output_tensor_list", "all_to_all_single": "output",
    "all_gather_object": "object_list", "gather_object": "object_gather_list", "scatter_object_list": "scatter_object_output_list",
    "broadcast_object_list": "object_list", "recv_object_list": "object_list",
}  # fmt: skip
"""Collective -> its parameter that takes what the others gave."""
FUNCTIONAL = (
    "broadcast", "all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather_tensor", "reduce_scatter_tensor",
    "all_to_all_single", "all_reduce_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
    "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "all_gather_single_autograd", "all_gather_tensor_autograd",
    "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd", "all_to_all_single_autograd", "permute_tensor",
)  # fmt: skip
"""Of torch.distributed._functional_collectives; they return what the others gave. The last six are made of others in torch 2.13."""

Tape = dict[str, bytes]
"""Call -> its outputs, encoded."""


def largest() -> int:
    """Bytes of the largest tensor that is recorded; 0 records nothing."""
    text = os.environ.get(wire.ENV_RECORD_BYTES, "")
    if text and not text.isdigit():
        raise WorkerError(f"{wire.ENV_RECORD_BYTES}={text}: a number of bytes, 0 to record nothing")
    return int(text) if text else _LARGEST


class _Names:
    """What a call is called; see the module's text."""

    def __init__(self) -> None:
        self._phase = "setup"
        self._groups: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._inside = threading.local()

    def begin_step(self) -> None:
        """The next calls belong to a step."""
        self._phase = "step"
        self._counts.clear()

    def next(self, op: str, group: str) -> str:
        """Name of the next call like this."""
        ordinal = self._groups.setdefault(group, len(self._groups))
        key = f"{self._phase}.{ordinal}.{op}"
        self._counts[key] += 1
        return f"{key}.{self._counts[key]}"

    @contextlib.contextmanager
    def outermost(self) -> Iterator[bool]:
        """Whether this call is not part of another one."""
        depth = getattr(self._inside, "depth", 0)
        self._inside.depth = depth + 1
        try:
            yield depth == 0
        finally:
            self._inside.depth = depth


class Recorder:
    """Listens to a live rank's collectives until the first step is done."""

    def __init__(self) -> None:
        self.tape: Tape = {}
        self._names = _Names()
        self._largest = largest()
        self._room = _TAPE_BYTES
        self._calls = 0

    @property
    def full(self) -> bool:
        """Whether it has had enough."""
        return self._room < 0 or self._calls >= _CALLS

    def begin_step(self) -> None:
        """The first step begins."""
        self._names.begin_step()

    def run(self, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a collective and remember what it gave, once it is complete."""
        if self.full or not _answers(call):
            return call(*args, **kwargs)
        with self._names.outermost() as outermost:
            result = call(*args, **kwargs)
        found = _outputs(call, args, kwargs, result) if outermost else None
        if found is None:
            return result
        outputs, group = found
        self._calls += 1
        keep = functools.partial(self._keep, self._names.next(name_of(call), group), outputs)
        if _is_collected(group):
            return result
        if isinstance(result, dist.Work):
            return _Watched(result, keep)
        keep()
        return result

    def _keep(self, name: str, outputs: list[Any]) -> None:
        try:
            encoded = values.encode([_settled(o, self._largest) for o in outputs])
        except (WorkerError, RuntimeError):
            return  # an object that is no plain value, a tensor that holds nothing (tracing)
        self._room -= len(encoded)
        if self._room >= 0:
            self.tape[name] = encoded


class _Watched(dist.Work):
    """An asynchronous collective whose outputs are kept when somebody has waited for it."""

    def __init__(self, inner: dist.Work, keep: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._keep = inner, keep

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait, then keep."""
        done = self._inner.wait(*args, **kwargs)
        self._keep()
        return done

    def __getattribute__(self, name: str) -> Any:
        own = name in ("wait", "_inner", "_keep", "__class__")
        return object.__getattribute__(self, name) if own else getattr(object.__getattribute__(self, "_inner"), name)


class Replay:
    """Gives a rehearsal what a live rank of its role was given. ``fetch`` is called once, when the first value is needed."""

    def __init__(self, fetch: Callable[[], Tape | None]) -> None:
        self._fetch: Callable[[], Tape | None] | None = fetch
        self._tape: Tape = {}
        self._names = _Names()
        self.replayed = 0
        self.waited_s = 0.0
        """For the tape."""
        self.synthesised: Counter[str] = Counter()
        """Calls that no recorded value answered, by collective."""
        self.called: set[str] = set()
        """Every kind of collective that was called."""

    def begin_step(self) -> None:
        """A rehearsed step begins; it is given what the first one was."""
        self._names.begin_step()

    def run(self, call: Callable[..., Any], stand_in: Callable[..., Any] | None, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a collective that reaches nobody, and put what was recorded in place of what it gave."""
        self.called.add(name_of(call))
        if not _answers(call):
            return (stand_in or call)(*args, **kwargs)
        with self._names.outermost() as outermost:
            result = (stand_in or call)(*args, **kwargs)
        if isinstance(result, dist.Work) and not is_put_off(result):
            result.wait()
        found = _outputs(call, args, kwargs, result) if outermost else None
        if found is None:
            return result
        if self._fetch is not None:
            fetch, self._fetch, began = self._fetch, None, time.monotonic()
            self._tape = fetch() or {}
            self.waited_s = time.monotonic() - began
        outputs, group = found
        encoded = self._tape.get(self._names.next(name_of(call), group))
        if encoded is not None and _put(outputs, values.decode(encoded)):
            self.replayed += 1
        else:
            self.synthesised[call.__name__] += 1
            for output in outputs if call.__name__ in ("recv", "irecv") else ():
                output.detach().zero_()  # torch's stand-in leaves what was in the memory
        return result


def name_of(call: Callable[..., Any]) -> str:
    """Kind of a collective."""
    return f"functional.{call.__name__}" if _is_functional(call) else call.__name__


def _answers(call: Callable[..., Any]) -> bool:
    """Whether a collective gives anything that came from others."""
    return call.__name__ in OUTPUT_OF or _is_functional(call)


def _is_functional(call: Callable[..., Any]) -> bool:
    return call.__module__ == functional.__name__


def _outputs(call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], result: Any) -> tuple[list[Any], str] | None:
    """What the others gave (tensors, or the list that objects are put into), and the group's name; None: they gave it elsewhere."""
    bound = inspect.signature(call).bind(*args, **kwargs).arguments
    if _is_functional(call):
        return (result if isinstance(result, list) else [result]), functional._resolve_group_name(bound["group"])
    target = bound.get(OUTPUT_OF[call.__name__])
    if target is None:
        return None
    group = bound.get("group") or c10d._get_default_group()
    name = group.group_name if isinstance(group, dist.ProcessGroup) else str(group)
    return ([target] if call.__name__.endswith(("_object", "_object_list")) or isinstance(target, torch.Tensor) else list(target)), name


def _is_collected(group: str) -> bool:
    """Whether calls on a group are put off, because the script is in torch's coalescing manager for it."""
    return any(pg.group_name == group for pg in c10d._world.pg_coalesce_state)


def is_put_off(work: Any) -> bool:
    """Whether it stands for an asynchronous call that torch's coalescing manager makes later, and must not be waited for."""
    return isinstance(work, c10d._IllegalWork)


def _settled(output: Any, largest: int) -> Any:
    """A copy, of tensors once they are complete; of a large one its beginning."""
    if isinstance(output, functional.AsyncCollectiveTensor):
        output = output.wait()
    if not isinstance(output, torch.Tensor):
        return output
    if type(output) not in (torch.Tensor, torch.nn.Parameter):
        raise WorkerError("a tensor that stands for others")
    plain = output.detach()
    if plain.nbytes <= largest:
        return plain.clone()
    count = max(1, min(_SAMPLE, largest) // plain.element_size())
    return {"beginning": plain.reshape(-1)[:count].clone(), "shape": list(plain.shape)}


def _whole(recorded: Any) -> Any:
    """A large tensor again: its beginning, repeated."""
    if not isinstance(recorded, dict):
        return recorded
    beginning, shape = recorded["beginning"], recorded["shape"]
    count = math.prod(shape)
    return beginning.repeat(-(-count // len(beginning)))[:count].view(shape)


def _put(outputs: list[Any], recorded: list[Any]) -> bool:
    """Overwrite outputs; False when these are not of the same kind."""
    recorded = [r if isinstance(o, list) else _whole(r) for o, r in zip(outputs, recorded, strict=False)]
    if len(outputs) != len(recorded) or not all(_alike(o, r) for o, r in zip(outputs, recorded, strict=True)):
        return False
    for output, value in zip(outputs, recorded, strict=True):
        if isinstance(output, list):
            output[:] = value
        else:
            with torch.no_grad():
                (output.wait() if isinstance(output, functional.AsyncCollectiveTensor) else output).copy_(value)
    return True


def _alike(output: Any, recorded: Any) -> bool:
    if isinstance(output, list):
        return isinstance(recorded, list) and len(output) == len(recorded)
    return isinstance(recorded, torch.Tensor) and output.shape == recorded.shape and output.dtype == recorded.dtype


# -- in the job's store -------------------------------------------------------------------------------------------------------------
def role_of(layout: Layout) -> str:
    """Ranks whose state looks alike play one role: a stage of a pipeline, a shard of one shape."""
    return hashlib.blake2b(repr(sorted(layout.items())).encode(), digest_size=8).hexdigest()


def publish(open_store: Callable[[], AgentStore], generation: int, rank: int, role: str, tape: Tape) -> None:
    """In the background: write our tape if we are to, and say where to find what fits our rank.

    With TMRUN_RECORDS=1 as our own, else as our role's unless another rank has.
    """

    def write() -> None:
        with contextlib.suppress(Exception):  # only rehearsals are poorer without
            store = open_store()
            try:
                _write(store, f"record/{generation}", rank, role, tape)
            finally:
                store.dispose()

    threading.Thread(target=write, name="tmrun-record", daemon=True).start()


def _write(store: AgentStore, prefix: str, rank: int, role: str, tape: Tape) -> None:
    name = f"rank{rank}" if os.environ.get(wire.ENV_RECORDS) == "1" else role
    if name != role or store.compare_set(f"{prefix}/by/{role}", "", str(rank)) == str(rank).encode():
        bulk.put(store, f"{prefix}/tape/{name}", bulk.pack(tape))
    store.set(f"{prefix}/of/{rank}", f"{name} {role}")


def fetch(open_store: Callable[[], AgentStore], generation: int, rank: int) -> Tape | None:
    """The tape of a rank's role. Waits TMRUN_RECORD_WAIT_S for it (0 if unset); None when there is none."""
    if not largest():
        return None
    patience = timedelta(seconds=patience_s())
    prefix = f"record/{generation}"
    store = open_store()
    try:
        if not _there(store, f"{prefix}/of/{rank}", patience):
            return None
        name, _ = store.get(f"{prefix}/of/{rank}").decode().split()
        if not _there(store, bulk.complete(f"{prefix}/tape/{name}"), patience):
            return None
        tape: Tape = bulk.get(store, f"{prefix}/tape/{name}", 2 * _TAPE_BYTES)
        return tape
    except (dist.DistStoreError, WorkerError):
        return None
    finally:
        store.dispose()


def role_in(store: AgentStore, generation: int, rank: int) -> str:
    """The role that a rank turned out to have; empty while it is not known. Does not wait. Raises DistStoreError."""
    key = f"record/{generation}/of/{rank}"
    return store.get(key).decode().split()[1] if store.check([key]) else ""


def patience_s() -> float:
    """How long a rehearsal may wait for what live ranks write down."""
    return float(os.environ.get(wire.ENV_RECORD_WAIT, "0"))


def _there(store: AgentStore, key: str, patience: timedelta) -> bool:
    if patience:
        store.wait([key], patience)
        return True
    return store.check([key])
