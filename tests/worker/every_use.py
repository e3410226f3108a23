"""Every way to communicate, each checked in every step: what a switch must not break. World 4, a 2x2 mesh.

When TEST_DIE/<case>-<rank> exists, the rank dies before that case; if its name is written into it, it is only frozen. With
TEST_DIE/saving-<rank> it dies in the middle of its next save, when all others have written their parts of it. The case "vote" is after all
others. What was computed with goes into the update, and into done<rank>.txt, a line a step. With TEST_REPLAYED=1 a rehearsal's first step
is checked too: it has to be given what the live rank was, but not in the cases UNRECORDED.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.nn as nn
from stale import count_closed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tmrun

WORLD = 4
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def floats(*values: float) -> torch.Tensor:
    return torch.tensor([float(v) for v in values])


class Cases:
    """One method a case; ``step`` makes the data differ from step to step."""

    def __init__(self, directory: Path) -> None:
        self.rank, self.directory, self.rehearsing, self.checking = dist.get_rank(), directory, False, True
        self.heard = 0.0
        self.world: Any = dist.group.WORLD
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
        self.half, self.same = halves[self.rank // 2], odd if self.rank % 2 else even
        torch.manual_seed(0)
        self.reference = Perceptron()
        self.tensor_parallel = self.copy_of_reference()
        self.sharded = Perceptron()
        self.sharded.load_state_dict(self.reference.state_dict())
        fully_shard(self.sharded, mesh=self.mesh)  # replicated over dp, sharded over tp: a lost shard has a replica
        self.replica = Perceptron()
        self.replica.load_state_dict(self.reference.state_dict())
        self.ddp = nn.parallel.DistributedDataParallel(self.replica)
        torch.manual_seed(1)
        self.stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(WORLD)]
        self.trained = nn.Linear(4, 4)
        inputs, outputs = (torch.zeros(2, 8, requires_grad=self.rank > 0),), (torch.zeros(2, 8, requires_grad=True),)
        device = torch.device("cpu")
        stage = PipelineStage(self.stages[self.rank], self.rank, WORLD, device, input_args=inputs, output_args=outputs)
        self.schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, t: ((y - t) ** 2).mean())
        half, world = self.half, self.world

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x * 2, "sum", world) + functional.all_gather_tensor(x, 0, half).sum()

        self.compiled_function = compiled

    def begin(self, rehearsing: bool) -> None:
        """A step. What tmrun was not given may hold gradients of one that broke off."""
        self.rehearsing, self.heard = rehearsing, 0.0
        for module in (self.reference, self.ddp, *self.stages):
            module.zero_grad()

    def copy_of_reference(self) -> nn.Module:
        model = Perceptron()
        model.load_state_dict(self.reference.state_dict())
        return parallelize_module(model, self.mesh["tp"], PLAN)

    def check(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        assert not self.checking or torch.allclose(got, wanted, atol=1e-5), (self.rank, got, wanted)
        self.heard += float(got.detach().double().sum())

    def both(self, call: Callable[[bool], Any]) -> None:
        """Sync, and async waited for at once."""
        call(False)
        call(True).wait()

    # -- tensors --------------------------------------------------------------------------------------------------------------------
    def broadcast(self, step: int) -> None:
        for asynchronous in (False, True):
            x = floats(self.rank + step)
            work = dist.broadcast(x, src=2, async_op=asynchronous)
            work and work.wait()
            self.check(x, floats(2 + step))

    def all_reduce(self, step: int) -> None:
        for asynchronous in (False, True):
            x = floats(self.rank + step)
            work = dist.all_reduce(x, async_op=asynchronous)
            work and work.wait()
            self.check(x, floats(6 + 4 * step))
        works = [(dist.all_reduce(y, async_op=True), y) for y in (floats(1) for _ in range(3))]
        for work, y in works:
            work.wait()
            self.check(y, floats(4))

    def all_reduce_of_the_group(self, step: int) -> None:
        x = floats(1)
        self.world.allreduce([x]).get_future().wait()
        self.check(x, floats(4))

    def reduce(self, step: int) -> None:
        for asynchronous in (False, True):
            x = floats(self.rank)
            work = dist.reduce(x, dst=3, async_op=asynchronous)
            work and work.wait()
            if self.rank == 3:
                self.check(x, floats(6))

    def all_gather(self, step: int) -> None:
        for asynchronous in (False, True):
            out = [torch.zeros(1) for _ in range(WORLD)]
            work = dist.all_gather(out, floats(self.rank + step), async_op=asynchronous)
            work and work.wait()
            self.check(torch.cat(out), torch.arange(4.0) + step)

    def all_gather_into_tensor(self, step: int) -> None:
        for asynchronous in (False, True):
            out = torch.zeros(WORLD)
            work = dist.all_gather_into_tensor(out, floats(self.rank + step), async_op=asynchronous)
            work and work.wait()
            self.check(out, torch.arange(4.0) + step)

    def all_gather_coalesced(self, step: int) -> None:
        out = [[torch.zeros(1), torch.zeros(2)] for _ in range(WORLD)]
        self.world.allgather_coalesced(out, [floats(self.rank), floats(step, self.rank)]).wait()
        self.check(torch.cat([o[0] for o in out]), torch.arange(4.0))
        for tensor in functional.all_gather_into_tensor_coalesced([floats(self.rank), floats(step)], self.world)[:1]:
            self.check(tensor + 0, torch.arange(4.0))

    def reduce_scatter(self, step: int) -> None:
        for asynchronous in (False, True):
            out = torch.zeros(1)
            work = dist.reduce_scatter(out, [floats(i + step) for i in range(WORLD)], async_op=asynchronous)
            work and work.wait()
            self.check(out, floats(4 * (self.rank + step)))

    def reduce_scatter_tensor(self, step: int) -> None:
        for asynchronous in (False, True):
            out = torch.zeros(1)
            work = dist.reduce_scatter_tensor(out, torch.arange(4.0) + step, async_op=asynchronous)
            work and work.wait()
            self.check(out, floats(4 * (self.rank + step)))

    def singles(self, step: int) -> None:
        """Newer names."""
        if not hasattr(dist, "all_gather_single"):
            return
        for asynchronous in (False, True):
            gathered, scattered = torch.zeros(WORLD), torch.zeros(1)
            work = dist.all_gather_single(gathered, floats(self.rank + step), async_op=asynchronous)
            work and work.wait()
            self.check(gathered, torch.arange(4.0) + step)
            work = dist.reduce_scatter_single(scattered, torch.arange(4.0) + step, async_op=asynchronous)
            work and work.wait()
            self.check(scattered, floats(4 * (self.rank + step)))

    def coalesced(self, step: int) -> None:
        """Deprecated ones."""
        for asynchronous in (False, True):
            one, two = floats(self.rank), floats(step, 1)
            work = dist.all_reduce_coalesced([one, two], async_op=asynchronous)
            work and work.wait()
            self.check(torch.cat([one, two]), floats(6, 4 * step, 4))
            out = [[torch.zeros(1), torch.zeros(2)] for _ in range(WORLD)]
            work = dist.all_gather_coalesced(out, [floats(self.rank), floats(step, self.rank)], async_op=asynchronous)
            work and work.wait()
            self.check(torch.cat([o[1] for o in out]), floats(*(v for rank in range(WORLD) for v in (step, rank))))

    def gather(self, step: int) -> None:
        for asynchronous in (False, True):
            out = [torch.zeros(1) for _ in range(WORLD)] if self.rank == 1 else None
            work = dist.gather(floats(self.rank), out, dst=1, async_op=asynchronous)
            work and work.wait()
            if out is not None:
                self.check(torch.cat(out), torch.arange(4.0))

    def scatter(self, step: int) -> None:
        for asynchronous in (False, True):
            x = torch.zeros(1)
            work = dist.scatter(x, [floats(i * step) for i in range(WORLD)] if self.rank == 0 else None, src=0, async_op=asynchronous)
            work and work.wait()
            self.check(x, floats(self.rank * step))

    def all_to_all(self, step: int) -> None:
        for asynchronous in (False, True):
            out = [torch.zeros(1) for _ in range(WORLD)]
            work = dist.all_to_all(out, [floats(10 * self.rank + i) for i in range(WORLD)], async_op=asynchronous)
            work and work.wait()
            self.check(torch.cat(out), torch.arange(4.0) * 10 + self.rank)

    def all_to_all_single(self, step: int) -> None:
        for asynchronous in (False, True):
            out = torch.zeros(4)
            work = dist.all_to_all_single(out, torch.arange(4.0) + 10 * self.rank, async_op=asynchronous)
            work and work.wait()
            self.check(out, torch.arange(4.0) * 10 + self.rank)

    def barrier(self, step: int) -> None:
        self.both(lambda asynchronous: dist.barrier(async_op=asynchronous))

    def monitored_barrier(self, step: int) -> None:
        dist.monitored_barrier()

    # -- point to point -------------------------------------------------------------------------------------------------------------
    def send_recv(self, step: int) -> None:
        if self.rank == 0:
            dist.send(floats(step), 1)
            dist.isend(floats(step + 1), 1).wait()
        elif self.rank == 1:
            x, y = torch.zeros(1), torch.zeros(1)
            dist.recv(x, 0)
            dist.irecv(y, 0).wait()
            self.check(torch.cat([x, y]), floats(step, step + 1))

    def batch_isend_irecv(self, step: int) -> None:
        given, got = floats(self.rank + step), torch.zeros(1)
        operations = [
            dist.P2POp(dist.isend, given, (self.rank + 1) % WORLD),
            dist.P2POp(dist.irecv, got, (self.rank - 1) % WORLD),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self.check(got, floats((self.rank - 1) % WORLD + step))

    # -- objects --------------------------------------------------------------------------------------------------------------------
    def objects(self, step: int) -> None:
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, {"rank": self.rank, "step": step})
        one: list[Any] = [("from", step) if self.rank == 0 else None]
        dist.broadcast_object_list(one, src=0)
        at_two: list[Any] | None = [None] * WORLD if self.rank == 2 else None
        dist.gather_object(self.rank, at_two, dst=2)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {r}" for r in range(WORLD)] if self.rank == 1 else None, src=1)
        passed: list[Any] = [None]
        if self.rank == 0:
            dist.send_object_list([step], 3)
        elif self.rank == 3:
            dist.recv_object_list(passed, 0)
        if self.checking:
            assert everyone == [{"rank": r, "step": step} for r in range(WORLD)]
            assert one == [("from", step)] and mine == [f"for {self.rank}"]
            assert at_two in (None, [0, 1, 2, 3]) and (self.rank != 3 or passed == [step])

    # -- what is built on these -----------------------------------------------------------------------------------------------------
    def sub_groups(self, step: int) -> None:
        for group in (self.half, self.same, self.mesh["dp"].get_group(), self.mesh["tp"].get_group()):
            x = floats(1)
            dist.all_reduce(x, group=group)
            self.check(x, floats(2))

    def functional(self, step: int) -> None:
        self.check(functional.all_reduce(floats(step), "sum", self.world) + 0, floats(4 * step))
        base = 2 * (self.rank // 2)
        self.check(functional.all_gather_tensor(floats(self.rank), 0, (self.mesh, 1)) + 0, floats(base, base + 1))
        self.check(functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, self.world) + 0, floats(4))
        exchanged = functional.all_to_all_single(torch.arange(4.0) + 10 * self.rank, None, None, self.world)
        self.check(exchanged + 0, torch.arange(4.0) * 10 + self.rank)

    def functional_coalesced(self, step: int) -> None:
        one, two = functional.all_reduce_coalesced([floats(step), floats(self.rank)], "sum", self.world)
        self.check(torch.cat([one + 0, two + 0]), floats(4 * step, 6))
        scattered = functional.reduce_scatter_tensor_coalesced([torch.ones(4), torch.arange(4.0)], "sum", [0, 0], self.world)
        self.check(torch.cat([each + 0 for each in scattered]), floats(4, 4 * self.rank))
        if hasattr(functional, "all_gather_single_coalesced"):
            (gathered,) = functional.all_gather_single_coalesced([floats(self.rank)], self.world)
            (scattered_single,) = functional.reduce_scatter_single_coalesced([torch.arange(4.0)], "sum", [0], self.world)
            self.check(torch.cat([gathered + 0, scattered_single + 0]), floats(0, 1, 2, 3, 4 * self.rank))

    def functional_rest(self, step: int) -> None:
        self.check(functional.broadcast(floats(self.rank + step), 1, self.world) + 0, floats(1 + step))
        self.check(functional.permute_tensor(floats(self.rank), [1, 2, 3, 0], self.world) + 0, floats((self.rank - 1) % WORLD))
        if hasattr(functional, "all_gather_single"):
            self.check(functional.all_gather_single(floats(self.rank), 0, self.world) + 0, torch.arange(4.0))
            self.check(functional.reduce_scatter_single(torch.arange(4.0), "sum", 0, self.world) + 0, floats(4 * self.rank))

    def functional_backward(self, step: int) -> None:
        x = floats(self.rank + 1).requires_grad_()
        gathered = functional.all_gather_tensor_autograd(x, 0, self.world)
        (gathered * torch.arange(1.0, 5.0)).sum().backward()
        self.check(x.grad, floats(4 * (self.rank + 1)))
        y = torch.arange(4.0).requires_grad_()
        functional.reduce_scatter_tensor_autograd(y, "sum", 0, self.world).sum().backward()
        self.check(y.grad, torch.ones(4))
        z = torch.arange(4.0).requires_grad_()
        (functional.all_to_all_single_autograd(z, None, None, self.world) * (self.rank + 1)).sum().backward()
        self.check(z.grad, torch.arange(1.0, 5.0))

    def compiled(self, step: int) -> None:
        self.check(self.compiled_function(floats(1 + self.rank)), floats(20) + (3 if self.rank < 2 else 7))

    def dtensor(self, step: int) -> None:
        full = torch.arange(16.0).view(4, 4) + step
        spread = distribute_tensor(full, self.mesh, [Shard(0), Shard(1)])
        self.check(spread.full_tensor(), full)
        self.check((spread @ spread.redistribute(self.mesh, [Replicate(), Replicate()])).full_tensor(), full @ full)

    def train_like_reference(self, model: nn.Module, step: int) -> None:
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        got, wanted = model(x), self.reference(x)
        got.sum().backward()
        wanted.sum().backward()
        self.check(got, wanted)
        self.check(model.up.weight.grad.full_tensor(), self.reference.up.weight.grad)
        model.zero_grad()
        self.reference.zero_grad()

    def tensor_parallelism(self, step: int) -> None:
        self.train_like_reference(self.tensor_parallel, step)

    def fully_sharded(self, step: int) -> None:
        self.train_like_reference(self.sharded, step)

    def distributed_data_parallel(self, step: int) -> None:
        torch.manual_seed(step)
        everybody = torch.randn(WORLD, 4, 8)
        self.ddp(everybody[self.rank]).mean().backward()
        self.reference(everybody.view(-1, 8)).mean().backward()
        self.check(self.replica.up.weight.grad, self.reference.up.weight.grad)
        self.ddp.zero_grad()
        self.reference.zero_grad()

    def pipeline(self, step: int) -> None:
        torch.manual_seed(step)
        x, target = torch.randn(8, 8), torch.randn(8, 8)
        if self.rank == 0:
            self.schedule.step(x)
        elif self.rank == WORLD - 1:
            self.schedule.step(target=target, losses=[])
        else:
            self.schedule.step()
        y = x
        for stage in self.stages:
            y = stage(y)
        loss = sum(((a - b) ** 2).mean() for a, b in zip(y.chunk(4), target.chunk(4), strict=True)) / 4
        own = self.stages[self.rank][0].weight
        if own.grad is not None:
            self.check(own.grad, torch.autograd.grad(loss, own)[0])
        self.stages[self.rank].zero_grad()

    def checkpoint(self, step: int) -> None:
        if step % 4:
            return
        folder = self.directory / f"checkpoint{step}"
        if self.rehearsing:
            torch.save({}, self.directory / "written_by_a_rehearsal")
            folder = folder if REPLAYED else self.directory / "written_by_a_rehearsal"
        if not REPLAYED:
            checkpoint.save({"model": self.tensor_parallel.state_dict(), "trained": self.trained.state_dict()}, checkpoint_id=folder)
            if self.rehearsing:
                checkpoint.async_save({"model": self.tensor_parallel.state_dict()}, checkpoint_id=folder).result()
                checkpoint.save_state_dict({"model": self.tensor_parallel.state_dict()}, checkpoint.FileSystemWriter(folder))
        if self.rehearsing and not REPLAYED:
            return
        fresh = {"model": parallelize_module(Perceptron(), self.mesh["tp"], PLAN).state_dict()}
        checkpoint.load(fresh, checkpoint_id=folder)
        self.check(fresh["model"]["up.weight"].full_tensor(), self.reference.up.weight.detach())

    def new_mesh(self, step: int) -> None:
        if not self.rehearsing:
            pair, pairs = dist.new_subgroups(2)
            x = floats(1)
            dist.all_reduce(x, group=pair)
            self.check(x, floats(2))
            for each in pairs:
                if each is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(each)
            group = dist.new_group([0, 1, 2, 3])
            self.check(distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)]).full_tensor(), torch.arange(8.0))
            dist.destroy_process_group(group)


REPLAYED = os.environ.get("TEST_REPLAYED") == "1"
UNRECORDED = (
    "all_reduce_of_the_group",
    "all_gather_coalesced",
    "coalesced",
    "compiled",
    "distributed_data_parallel",
    "functional_backward",
)
"""Methods of a group, deprecated functions, compiled code, gradients."""
CASES = [name for name, value in vars(Cases).items() if callable(value) and value.__code__.co_varnames[:2] == ("self", "step")]


def watch_saves(cases: Cases, die: Path) -> None:
    """Here a rank dies in the middle of one."""
    plain = checkpoint.FileSystemWriter.write_data

    def write_data(writer: Any, *args: Any) -> Any:
        if cases.rehearsing:
            return plain(writer, *args)
        written = [die / f"{Path(writer.path).name}-{rank}" for rank in range(WORLD) if rank != cases.rank]
        if (die / f"saving-{cases.rank}").exists():
            while not all(path.exists() for path in written):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(writer, *args)
        (die / f"{Path(writer.path).name}-{cases.rank}").touch()
        return result

    checkpoint.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def at(event: Path) -> None:
    """Die or freeze here, if a test wants it."""
    if event.exists():
        os.kill(os.getpid(), signal.Signals[event.read_text() or "SIGKILL"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log-losses", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    die, rank = Path(os.environ["TEST_DIE"]), dist.get_rank()
    cases = Cases(args.log_losses)
    model = cases.trained
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tmrun.join(model=model, optimizer=optimizer, tensor_parallel=cases.tensor_parallel, sharded=cases.sharded)
    closed = count_closed()
    watch_saves(cases, die)
    for step in run.steps(args.steps):
        with step:
            cases.begin(run.rehearsing)
            for name in CASES:
                if not run.rehearsing:
                    at(die / f"{name}-{rank}")
                cases.checking = not run.rehearsing or (REPLAYED and int(step) == 0 and name not in UNRECORDED)
                getattr(cases, name)(int(step))
            heard = torch.tensor([cases.heard])
            dist.all_reduce(heard)
            (model(torch.ones(1, 4)).sum() * torch.sin(heard)).backward()
            if not run.rehearsing:
                at(die / f"vote-{rank}")
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            with open(args.log_losses / f"done{rank}.txt", "a") as log:
                log.write(f"{step} {cases.heard.hex()}\n")
            (args.log_losses / f"closed{os.getpid()}.txt").write_text(f"{closed()}")
    print(
        "final parameters sha256",
        hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(),
        flush=True,
    )


if __name__ == "__main__":
    main()
