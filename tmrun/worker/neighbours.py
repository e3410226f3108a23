"""The ranks of one node that rehearse together meet once over real connections: what only these warm is warm then (a backend's first
communicator between processes, its transports and kernels), and a node on which they do not work is found before it is needed.

When the steps of a rehearsal are over, all of the node's processes enter, each when it gets there. They build a communicator of each
backend that groups of all of them use, run collectives on known values, compare what came out, and close it. (A store that is away just
while they build costs the rehearsal.) The rehearsed steps themselves wait for nobody: what neighbours would say there is on the tapes
(``record``), and one that fails cannot hang the others in the script.
May not know: the script's groups, beyond the backends they use.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.worker.agent_store import AgentStore
from tmrun.worker.comm import Kind, Kinds, Like
from tmrun.worker.identity import Identity
from tmrun.worker.link import fence

_ENTER_S = 3600.0
"""How much later than another a process of one node may be with its rehearsal."""
_TIMEOUT = timedelta(minutes=5)
_LOOK_S = 1.0
_NUMBERS = 1 << 20
"""Of 4 bytes each, in the largest collective; a little fewer where the processes cannot share them evenly."""


@dataclass(frozen=True)
class Neighbours:
    """``count`` processes that know each other by ``scope``; this one is number ``index``."""

    scope: str
    index: int
    count: int

    def meet(self, groups: Iterable[Kinds], here: torch.device, open_store: Callable[[], AgentStore]) -> dict[str, int]:
        """Once. Backend and device -> MB of one tensor that all have summed up in a second, after a first time.

        ``here``: the device that this process works on. Raises WorkerError naming the backend.
        """
        kinds_of = {f"{kind.NAME} on {device}": (kind, device) for kinds in groups for device, kind in kinds.items()}
        mine = {title: pair for title, pair in kinds_of.items() if pair[1] in ("cpu", here.type)}
        client, found = open_store(), {}
        try:
            for title in sorted(self._enter(client, set(mine))):
                kind, name = mine[title]
                device = here if name == here.type else torch.device(name)
                found[title] = self._meet(title, kind, PrefixStore(f"{self.scope}/{title}", client), device)
            return found
        finally:
            client.dispose()

    def _enter(self, store: Store, titles: set[str]) -> set[str]:
        """Wait for all, for gloo bears no member that is much later than the others; what all of them use."""
        entered = [f"{self.scope}/in/{index}" for index in range(self.count)]
        end = time.monotonic() + _ENTER_S
        while True:
            try:
                store.set(entered[self.index], json.dumps(sorted(titles)))
                store.wait(entered, timedelta(seconds=_ENTER_S))
                return titles.intersection(*(json.loads(store.get(key)) for key in entered))
            except dist.DistStoreError:  # it is away for a while
                if time.monotonic() > end:
                    raise
                time.sleep(_LOOK_S)

    def _meet(self, title: str, kind: Kind, store: Store, device: torch.device) -> int:
        what = f"the {self.count} workers of this node cannot use {title} among them"
        late = threading.Timer(2 * _TIMEOUT.total_seconds(), fence, [f"{what}: it hangs"])  # what is queued on a device has no timeout
        late.daemon = True
        late.start()
        try:
            backend, connection = kind.build(store, self.index, self.count, _TIMEOUT, Like(device))
            try:
                speed = self._talk(backend, device)
                self._leave(store)
                return speed
            finally:
                connection.vacate()
                connection.close()
        except dist.DistStoreError:
            raise
        except RuntimeError as error:
            raise WorkerError(f"{what}: {error}") from error
        finally:
            late.cancel()

    def _leave(self, store: Store) -> None:
        """Together: who takes its memory back may have sent what another has not received yet."""
        store.set(f"out/{self.index}", "1")
        store.wait([f"out/{index}" for index in range(self.count)], _TIMEOUT)

    def _talk(self, backend: Any, device: torch.device) -> int:
        """Run each kind once, the first one twice; raises RuntimeError when a value is not what it has to be."""
        count, part = self.count, _NUMBERS // self.count
        whole, share = (torch.empty(n, dtype=torch.float32, device=device) for n in (part * count, part))
        everybody = count * (count + 1) // 2
        for _ in range(2):
            whole.fill_(self.index + 1)
            began = time.monotonic()
            backend.allreduce([whole]).wait()
            _compare("sum", whole, [everybody] * count)  # on a device this waits
            took = time.monotonic() - began
        share.fill_(self.index + 1)
        backend._allgather_base(whole, share).wait()
        _compare("gather", whole, range(1, count + 1))
        backend._reduce_scatter_base(share, whole).wait()
        _compare("reduce-scatter", share, [count * (self.index + 1)])
        whole.fill_(self.index + 1)
        mixed = torch.empty_like(whole)
        backend.alltoall_base(mixed, whole, [], []).wait()
        _compare("all-to-all", mixed, range(1, count + 1))
        backend.broadcast([whole]).wait()
        _compare("broadcast", whole, [1] * count)
        return int(whole.nbytes / took / 1e6)


def from_environment(who: Identity) -> Neighbours | None:
    """None: there is none, or an agent that does not say so."""
    scope = os.environ.get(wire.ENV_NEIGHBOURS, "")
    return Neighbours(f"neighbours/{scope}", who.local_rank, who.local_world) if scope and who.local_world > 1 else None


def _compare(what: str, got: torch.Tensor, wanted: Iterable[int]) -> None:
    """Each equal share of ``got`` holds one number."""
    shares = got.view(len(wanted := list(wanted)), -1)
    found = [(float(share.min()), float(share.max())) for share in shares]
    if found != [(w, w) for w in wanted]:
        raise RuntimeError(f"a {what} gave {found[:4]} where {wanted[:4]} belong")
