"""A small byte-level GPT on the source text of Python's standard library, trained with DistributedDataParallel.

    python examples/gpt_ddp.py --steps 100
    torchrun --nproc-per-node 2 examples/gpt_ddp.py --steps 100
    tmrun ... examples/gpt_ddp.py --steps 100

What tmrun needs are the lines marked (tmrun); under torchrun and plain Python they do nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import tmrun  # (tmrun)

VOCABULARY = 256
CONTEXT = 32
HEADS = 4
TEXT_BYTES = 4 << 20


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.position)))


class Batches:
    """Random windows of the text, different ones on every rank; ``position`` counts the batches drawn."""

    def __init__(self, text: torch.Tensor, batch: int, rank: int, seed: int) -> None:
        self.text, self.batch, self.rank, self.seed = text, batch, rank, seed
        self.position = 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(hash((self.seed, self.rank, self.position)))
        starts = torch.randint(0, len(self.text) - CONTEXT - 1, (self.batch,), generator=generator)
        windows = torch.stack([self.text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
        self.position += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def standard_library() -> torch.Tensor:
    """The text, as bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:TEXT_BYTES]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="per rank")
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--log-losses", type=Path, metavar="DIR", help="every rank appends its exact losses to DIR/rank<r>.txt")
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> nn.Module:
    model = GPT(args.d_model, args.layers, args.dropout)
    if args.compile:
        model.compile()
    return model


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(args.seed)
    model = make_model(args)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    torch.manual_seed(args.seed + 1 + rank)  # dropout differs between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)))
    )
    batches = Batches(standard_library(), args.batch, rank, args.seed)

    def on_role(new: int) -> None:  # (tmrun) optional: lets a standby take any rank without starting the script again
        nonlocal rank
        rank = batches.rank = new

    run = tmrun.join(model=model, optimizer=optimizer, schedule=schedule, batches=batches, on_role=on_role)  # (tmrun)
    for step in run.steps(args.steps):  # (tmrun) was: for step in range(args.steps)
        with step:  # (tmrun)
            inputs, targets = batches.next()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if step.committed:
            if args.log_losses:
                with open(args.log_losses / f"rank{rank}.txt", "a", buffering=1) as log:
                    log.write(f"{step} {loss.item().hex()}\n")
            if rank == 0 and (step % args.print_every == 0 or step == args.steps - 1):
                print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)

    if rank == 0:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        print(f"final parameters sha256 {digest}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
