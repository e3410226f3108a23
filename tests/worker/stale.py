"""What is left of a communicator once its group has another one: connections that tmrun closed, so that whoever still uses it fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tmrun.worker import comm_gloo, groups

CPU = torch.device("cpu")


def count_closed() -> Callable[[], int]:
    """From here on; the answer is how many connections this process has closed."""
    counts: list[int] = []
    plain = comm_gloo.Connections.close

    def close(connection: comm_gloo.Connections) -> int:
        counts.append(plain(connection))
        return counts[-1]

    comm_gloo.Connections.close = close  # type: ignore[method-assign]
    return lambda: sum(counts)


def first_communicator(pg: Any) -> Any:
    """What torch itself made for a group. With the shim it stays registered beside it, under its own type."""
    current = pg._get_backend(CPU)
    if isinstance(current, dist.ProcessGroupGloo):
        return current
    types = dist.ProcessGroup.BackendType
    groups.select(pg, ["cpu"], types.GLOO, current)
    found = pg._get_backend(CPU)
    groups.select(pg, ["cpu"], types(16), current)
    assert pg._get_backend(CPU) is current and isinstance(found, dist.ProcessGroupGloo), (current, found)
    return found


class Stale:
    """The world's first communicator, kept by ranks 0 and 2, which can reach each other whoever else has gone."""

    def __init__(self, world: Any, folder: Path) -> None:
        self._backend, self._rank, self._folder = first_communicator(world), world.rank(), folder
        self._closed = count_closed()

    def use(self, when: str) -> None:
        """Write down what comes of it; in a thread, for it may hang."""
        threading.Thread(target=self._use, args=(when,), daemon=True).start()

    def _use(self, when: str) -> None:
        closed = self._closed()
        came = [self._try(self._pass_on)]
        if came != [""]:
            came.append(self._try(lambda: self._backend.allreduce([torch.ones(1)])))
        done = self._folder / f"stale-{when}-{self._rank}.txt"
        done.with_suffix(".new").write_text(json.dumps({"came": came, "closed": closed}))
        done.with_suffix(".new").rename(done)

    def _pass_on(self) -> dist.Work:
        number = [torch.ones(1)]
        return self._backend.send(number, 2, 7) if self._rank == 0 else self._backend.recv(number, 0, 7)  # type: ignore[no-any-return]

    def _try(self, call: Callable[[], dist.Work]) -> str:
        """The error, if there is one."""
        try:
            call().wait()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""
