"""How fast a rank's state moves between two processes, against what a plain gloo send reaches between the same two, in turn.

    python bench/transfer.py [--mb 256] [--repeats 7]

Method: two processes, one gloo group, a model and its AdamW state of about ``--mb``. Plain: one 32 MiB tensor after the other, every
receive posted before. State: what a joiner does, layout check, packing, checksums and copying in place included. The machine's loopback.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tmrun.worker import comm, image, transfer
from tmrun.worker.state import State

WIDTH = 1024
_PLAIN = 7


def main() -> None:
    """Run, print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="tmrun-transfer-") as folder:
        ends = [spawn.Process(target=end, args=(rank, f"{folder}/store", args.mb, args.repeats, results)) for rank in (0, 1)]
        for process in ends:
            process.start()
        size, plain, state = results.get()
        for process in ends:
            process.join()
    rates = [size / statistics.median(times) / 1e9 for times in (plain, state)]
    ratio = statistics.median(p / s for p, s in zip(plain, state, strict=True))
    print(
        f"{size / 1e6:.0f} MB, {args.repeats} in turn, {os.cpu_count()} cores: plain gloo {rates[0]:.2f} GB/s, "
        f"state {rates[1]:.2f} GB/s, {100 * ratio:.0f} % of it"
    )


def end(rank: int, store: str, mb: int, repeats: int, results: Any) -> None:
    """One of the two processes; rank 0 sends."""
    torch.set_num_threads(1)
    backend = connected(rank, store)
    state, size = training(mb)
    pieces = in_pieces(size)
    plain, moved = [], []
    for _ in range(repeats):
        plain.append(timed(backend, rank, lambda: send_plain(backend, rank, pieces)))
        moved.append(timed(backend, rank, lambda: move(backend, rank, state)))
    if rank == 1:
        results.put((size, plain, moved))
    Path(store).touch()


def plain_end(rank: int, store: str, size: int, results: Any) -> None:
    """One of two processes that only send plain tensors; rank 1 tells the median of some times."""
    torch.set_num_threads(1)
    backend, pieces = connected(rank, store), in_pieces(size)
    times = [timed(backend, rank, lambda: send_plain(backend, rank, pieces)) for _ in range(_PLAIN)]
    if rank == 1:
        results.put(statistics.median(times))


def connected(rank: int, store: str) -> comm.Backend:
    """A gloo group of the two."""
    return comm.build(comm.CONTROL, dist.FileStore(store, 2), rank, 2, timedelta(minutes=5)).backend


def in_pieces(size: int) -> list[torch.Tensor]:
    """So many bytes, of which none has more than a part of a state."""
    whole = [torch.ones(image.PART, dtype=torch.uint8) for _ in range(size // image.PART)]
    return [*whole, torch.ones(size % image.PART, dtype=torch.uint8)] if size % image.PART else whole


def layers(mb: int) -> int:
    """How many make about so much state, with their gradients' two averages."""
    return max(1, mb * 1_000_000 // (3 * 4 * WIDTH * (WIDTH + 1)))


def training(mb: int) -> tuple[State, int]:
    """A model after one step: a third each for parameters and AdamW's two averages, in large tensors and small ones."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers(mb))))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = State()
    state.register({"model": model, "optimizer": optimizer})
    return state, sum(t.nbytes for owned in state.tensors().values() for t in owned.values())


def timed(backend: comm.Backend, rank: int, call: Any) -> float:
    """Seconds from when both are ready until both are done."""
    meet(backend, rank)
    began = time.perf_counter()
    call()
    meet(backend, rank)
    return time.perf_counter() - began


def meet(backend: comm.Backend, rank: int) -> None:
    """A small message each way."""
    token = torch.zeros(1)
    (backend.send if rank else backend.recv)([token], 1 - rank, 1).wait()
    (backend.recv if rank else backend.send)([token], 1 - rank, 2).wait()


def send_plain(backend: comm.Backend, rank: int, pieces: list[torch.Tensor]) -> None:
    """All pieces, none waited for before the last is under way."""
    works = [(backend.recv if rank else backend.send)([piece], 1 - rank, 3) for piece in pieces]
    for work in works:
        work.wait()


def move(backend: comm.Backend, rank: int, state: State) -> None:
    """As a handover does."""
    if rank:
        transfer.receive_source(backend, 0, state)
    else:
        transfer.send_source(backend, 1, state, {})


if __name__ == "__main__":
    main()
