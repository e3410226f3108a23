"""What ``gpu_check`` trains: a GPT of some size under DDP, on one device for all ranks, deterministic, and told about itself.

    python bench/gpu_train.py --device cuda --backend nccl --steps 40

``--stages FILE``: how old the process was (s) when torch was imported, the device was ready, the model made, and after each of the first
three steps. ``--memory DIR``: every 20 ms one line [wall clock, MB in tensors, MB kept by torch, MB used on the device], a file a process.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def age_s() -> float:
    """Of this process, in seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gpt_ddp import GPT, Batches, standard_library  # noqa: E402

import tmrun  # noqa: E402
from tmrun.worker import faults  # noqa: E402

STAGES: dict[str, float] = {"imported": age_s()}
_MB = 1 << 20
_EVERY_S = 0.02


def main() -> None:
    """Train."""
    args = arguments()
    device = prepare(args.device)
    STAGES["device"] = age_s()
    if args.memory:
        threading.Thread(target=watch_memory, args=(args.memory, device), daemon=True).start()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(args.backend)
    model = make_model(args, device)
    STAGES["model"] = age_s()
    train(args, device, model)
    parameters = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    print(f"final parameters sha256 {hashlib.sha256(parameters).hexdigest()}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The same on all ranks; random numbers differ from here on."""
    torch.manual_seed(0)
    model: nn.Module = GPT(args.width, args.layers, 0.1).to(device)
    if args.compile:
        model.compile()
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return model


def train(args: argparse.Namespace, device: torch.device, model: nn.Module) -> None:
    """The loop."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(standard_library(), args.batch, rank, 0)

    def on_role(new: int) -> None:
        nonlocal rank
        rank = batches.rank = new

    run = tmrun.join(model=model, optimizer=optimizer, batches=batches, on_role=on_role)
    current = die_when_told(run, model, rank)
    for step in run.steps(args.steps):
        current[0] = int(step)
        with step:
            if not run.rehearsing:
                time.sleep(args.pace)
            inputs, targets = (part.to(device) for part in batches.next())
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step < 3:
            note_stage(args, device, int(step))
        if step.committed and args.log_losses:
            with open(args.log_losses / f"rank{rank}.txt", "a", buffering=1) as log:
                log.write(f"{int(step)} {loss.item().hex()}\n")


def die_when_told(run: tmrun.Run, model: nn.Module, rank: int) -> list[int]:
    """TMRUN_TEST_KILL's point ``backward``, in the middle of it. Returns where the present step is to be noted."""
    fault, current = None if run.rehearsing else faults.from_environment(rank), [0]
    if fault is not None:

        def backward(_: torch.Tensor) -> None:
            fault(current[0], "backward")

        list(model.parameters())[3].register_post_accumulate_grad_hook(backward)
    return current


def note_stage(args: argparse.Namespace, device: torch.device, step: int) -> None:
    """One of the first three steps is done."""
    synchronize(device)
    STAGES.setdefault(f"step {step}", age_s())
    if step == 2 and args.stages:
        args.stages.write_text(json.dumps(STAGES))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pace", type=float, default=0.03)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--stages", type=Path)
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--log-losses", type=Path)
    return parser.parse_args()


def prepare(kind: str) -> torch.device:
    """The first device, and nothing that gives other bits from time to time."""
    torch.set_num_threads(1)
    if kind == "cpu":
        return torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    for choice in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{choice}_sdp")(False)
    torch.cuda.set_device(0)
    torch.ones(1, device="cuda")
    return torch.device("cuda", 0)


def synchronize(device: torch.device) -> None:
    """Everything queued has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def watch_memory(folder: Path, device: torch.device) -> None:
    """Write what this process takes, for as long as it lives."""
    with open(folder / f"{os.getpid()}.txt", "a", buffering=1) as log, contextlib.suppress(RuntimeError):
        while True:
            log.write(json.dumps([time.time(), *memory(device)]) + "\n")
            time.sleep(_EVERY_S)


def memory(device: torch.device) -> tuple[Any, ...]:
    """MB in tensors, kept by torch, used on the device by all. On the CPU: of this process, three times the same."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_allocated(device) / _MB, torch.cuda.memory_reserved(device) / _MB, (total - free) / _MB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (pages * os.sysconf("SC_PAGE_SIZE") / _MB,) * 3


if __name__ == "__main__":
    main()
