"""The worker's parts, each alone: votes, board, state and its transfer, stores, communicators, steps outside tmrun."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from fake_agent import FakeAgent
from fake_nccl import Queued

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.worker import api, comm, comm_gloo, handover, image, rng, transfer, values, vote, wires
from tmrun.worker.agent_store import AgentStore, SwitchStore
from tmrun.worker.ballots import Ledger
from tmrun.worker.board import Board, Pending
from tmrun.worker.current import HOLDER
from tmrun.worker.state import State


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    agent = FakeAgent(tmp_path / "s")
    yield agent
    agent.close()


@pytest.fixture
def pair() -> tuple[comm.Communicator, comm.Communicator]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: comm.build(comm.CONTROL, store, rank, 2, timedelta(seconds=30)), range(2))
    return first, second


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(60) for f in [pool.submit(call) for call in calls]]


# -- votes --------------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def world(request: pytest.FixtureRequest) -> list[comm.Communicator]:
    """A communicator of so many ranks."""
    size, store = request.param, dist.HashStore()
    return together(*(lambda r=r: comm.build(comm.CONTROL, store, r, size, timedelta(seconds=30)) for r in range(size)))


@pytest.fixture
def ring(request: pytest.FixtureRequest) -> list[wires.Wires]:
    """So many ranks, each a node."""
    return wired(request.param)


def wired(world: int, local_world: int = 1) -> list[wires.Wires]:
    store = dist.HashStore()
    return together(*(partial(wires.connect, store, r, vote.peers_of(r, world, local_world)) for r in range(world)))


def polls(ring: list[wires.Wires], local_world: int = 1) -> tuple[list[vote.Poll], list[dict[int, bytes]]]:
    return [vote.Poll(w, r, len(ring), local_world) for r, w in enumerate(ring)], [{} for _ in ring]


@pytest.mark.parametrize("ring", [2, 3, 4, 5, 8], indirect=True)
def test_everybody_hears_of_everybody_and_witnesses_hold(ring: list[wires.Wires]) -> None:
    made, held = polls(ring)
    for step in range(3):
        ballots = [vote.Ballot(step, ready=7 + (r == step), held=r, every=r + 1) for r in range(len(ring))]
        blobs = [f"{r} {step}".encode() for r in range(len(ring))]
        tallies = together(*(partial(made[r].vote, ballots[r], blobs[r], held[r].__setitem__) for r in range(len(ring))))
        last = len(ring) - 1
        assert set(tallies) == {vote.Tally(step, step, 7, 8 if step <= last else 7, 0, last, last + 1)}
        for rank in range(len(ring)):
            wards = vote.wards_of(rank, len(ring), 1)
            assert held[rank] == {ward: f"{ward} {step}".encode() for ward in wards}
            assert len(wards) == min(2, last)


@pytest.mark.parametrize("ring", [2, 5], indirect=True)
def test_a_blob_may_have_any_length(ring: list[wires.Wires]) -> None:
    """Nobody reads while all send, and the kernel has room for a part of it only."""
    made, held = polls(ring)
    for length in (0, 1, 64 << 10, (64 << 10) + 1, 30 << 20, 5):
        blobs = [bytes([r]) * (length + r) for r in range(len(ring))]
        together(*(partial(made[r].vote, vote.Ballot(1), blobs[r], held[r].__setitem__) for r in range(len(ring))))
        for rank in range(len(ring)):
            assert held[rank] == {ward: blobs[ward] for ward in vote.wards_of(rank, len(ring), 1)}


@pytest.mark.parametrize("ring", [2], indirect=True)
def test_ranks_in_different_steps_are_an_error(ring: list[wires.Wires]) -> None:
    made, held = polls(ring)

    def run(rank: int) -> None:
        with pytest.raises(WorkerError, match="different steps, 0 to 1"):
            made[rank].vote(vote.Ballot(rank), b"", held[rank].__setitem__)

    together(lambda: run(0), lambda: run(1))


@pytest.mark.parametrize(("ring", "end"), [(2, "abort"), (4, "abort"), (2, "death")], indirect=["ring"])
@pytest.mark.parametrize("length", [0, 30 << 20])
def test_an_abort_or_a_death_ends_a_blocked_vote(ring: list[wires.Wires], end: str, length: int) -> None:
    """A long blob that nobody reads is blocked as well, and let go."""
    made, held = polls(ring)
    ended = ring[0].abort if end == "abort" else ring[-1].close
    ender = threading.Timer(0.2, ended)
    ender.start()
    with pytest.raises(dist.DistBackendError, match="Connection closed: rank"):
        made[0].vote(vote.Ballot(0), bytes(length), held[0].__setitem__)
    ender.join()
    with pytest.raises(dist.DistBackendError):
        made[0].vote(vote.Ballot(0), b"", held[0].__setitem__)


def test_who_does_not_know_the_token_or_is_not_expected_is_turned_away() -> None:
    store = dist.HashStore()

    def intrude() -> None:
        host, port, token = store.get("wire/1").decode().split(" ")
        for said, rank in ((bytes(16), 0), (bytes.fromhex(token), 7), (b"", 0)):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(said + rank.to_bytes(4, "little") if said else b"x")
                if said:
                    assert stranger.recv(1) == b"", "it is let in"

    with ThreadPoolExecutor(2) as pool:
        higher = pool.submit(wires.connect, store, 1, {0})
        pool.submit(intrude).result(30)
        lower = pool.submit(wires.connect, store, 0, {1})
        ours, theirs = higher.result(30), lower.result(30)
    theirs.send(1, b"hello")
    assert bytes(ours.receive(0, 5)) == b"hello"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_does_not_come(rank: int) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(RuntimeError):
        wires.connect(store, rank, {1 - rank}, timedelta(seconds=0.5))


@pytest.mark.parametrize("ring", [4, 5], indirect=True)
@pytest.mark.parametrize("late", [0, 3])
def test_nobody_passes_before_every_witness_holds(ring: list[wires.Wires], late: int) -> None:
    made, held = polls(ring)
    may_hold, passed = threading.Event(), threading.Event()

    def hold_late(ward: int, blob: bytes) -> None:
        assert not passed.wait(0.3), "somebody passed before the late witness held anything"
        may_hold.wait()
        held[late][ward] = blob

    def run(rank: int) -> None:
        made[rank].vote(vote.Ballot(0), b"", hold_late if rank == late else held[rank].__setitem__)
        passed.set()

    threading.Timer(0.5, may_hold.set).start()
    together(*(partial(run, rank) for rank in range(len(ring))))
    assert all(len(h) == 2 for h in held)


@pytest.mark.parametrize(
    ("world", "local", "witnesses"),
    [(1, 1, ()), (2, 1, (0,)), (4, 2, (3,)), (6, 2, (3, 5)), (4, 4, (2, 3)), (2, 2, (0,)), (16, 2, (3, 9)), (8, 1, (2, 5))],
)
def test_witnesses_are_on_other_nodes(world: int, local: int, witnesses: tuple[int, ...]) -> None:
    assert vote.witnesses_of(min(1, world - 1), world, local) == witnesses
    for rank in range(world):
        assert all(rank in vote.wards_of(w, world, local) for w in vote.witnesses_of(rank, world, local))


def test_a_ledger_keeps_what_wards_said_twice_though_only_changes_travel() -> None:
    ledgers, data, store = [Ledger(), Ledger()], [Counter(), Counter()], dist.HashStore()
    pair = together(*(partial(comm.control, store, r, 2, {1 - r}) for r in range(2)))
    states = [State(objects={"data": d, "same": Counter()}) for d in data]
    for step in range(4):
        data[1].n = step
        together(*(partial(ledgers[i].vote, pair[i], (i, 1), states[i], vote.Ballot(step)) for i in range(2)))
    assert ledgers[0].witnessed((0, 1)) == {2: (0, 1), 3: (0, 1)}
    said = [ledgers[0].said(1, step) for step in (2, 3)]
    assert [values.decode(s["object/data"])["n"] for s in said] == [2, 3]
    assert said[1] == states[1].needs() == ledgers[1].said(1, 3)
    with pytest.raises(WorkerError, match=r"vote of step 1; kept are \[2, 3\]"):
        ledgers[0].said(1, 1)


class Counter:
    n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_cut_connections_become_quiet(pair: Any) -> None:
    """A collective that nobody else enters: blocked, then told of the cut; no thread of the communicator moves after that."""
    ours = pair[0].connection
    assert len(ours.threads) >= 3
    work = pair[0].backend._allgather_base(torch.zeros(2), torch.zeros(1))
    ours.abort()
    with pytest.raises(RuntimeError, match="gloo"):
        work.wait()
    deadline = time.monotonic() + 30
    while not ours.quiet():
        assert time.monotonic() < deadline
    spinning = comm_gloo.Connections(threads=frozenset({threading.get_native_id()}))
    assert not spinning.quiet(), "the thread that asks is running"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.mark.parametrize("kind", ["pipe", "listener", "other connection", "closed"])
def test_a_descriptor_that_is_another_file_by_now_is_left_alone(kind: str) -> None:
    first, second = tcp_pair()
    number = first.fileno()
    inode = str(Path(f"/proc/self/fd/{number}").readlink())
    connections = comm_gloo.Connections(frozenset({(number, inode)}))
    with contextlib.ExitStack() as stack:
        spare = os.dup(number)  # the connection itself lives on
        stack.callback(os.close, spare)
        stack.enter_context(second)
        first.detach()
        os.close(number)
        match kind:
            case "pipe":
                for end in os.pipe():
                    stack.callback(os.close, end)
            case "listener":
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            case "other connection":
                for each in tcp_pair():
                    stack.enter_context(each)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        assert connections.abort() == 0
        assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"  # noqa: PTH208


# -- board --------------------------------------------------------------------------------------------------------------------------
def pending(number: int, kind: wire.Kind = wire.Kind.FAILURE) -> Pending:
    return Pending(wire.Prepare(number, kind, number + 1, (1,), 0, 1), 0.0)


def commit(number: int) -> wire.Commit:
    return wire.Commit(number, number + 1, 5, {}, {})


def test_a_newer_prepare_replaces_an_undecided_one() -> None:
    board, old, new = Board(), pending(1, wire.Kind.DRAIN), pending(2)
    board.post(old)
    board.post(new)
    assert old.gone
    assert board.drain is None
    assert board.failure is new


def test_a_commit_stands_until_it_is_carried_out() -> None:
    board, drain, failure = Board(), pending(1, wire.Kind.DRAIN), pending(2)
    board.post(drain)
    board.decide(commit(1))
    board.post(failure)
    board.decide(wire.Abort(1, "late"))
    assert board.drain is drain
    assert not drain.gone
    board.done(drain)
    assert board.drain is None
    board.decide(wire.Abort(2, "off"))
    assert failure.gone
    assert board.failure is None


# -- state --------------------------------------------------------------------------------------------------------------------------
class Net(torch.nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width)
        self.register_buffer("hidden", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.hidden.sum()


def trained(steps: int, width: int = 5, **options: Any) -> State:
    net, state = Net(width), State()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    state.register({"net": net, "optimizer": optimizer, "schedule": schedule})
    for _ in range(steps):
        net(torch.rand(8, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return state


def contents(state: State) -> Any:
    return {n: {k: t.clone() for k, t in owned.items()} for n, owned in state.tensors().items()}


def equal(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(
        left[n].keys() == right[n].keys() and all(torch.equal(left[n][k], right[n][k]) for k in left[n]) for n in left
    )


@pytest.mark.parametrize(("source_steps", "joiner_steps"), [(3, 2), (3, 0), (0, 2)])
def test_a_successor_becomes_its_source_in_place(pair: Any, source_steps: int, joiner_steps: int) -> None:
    source, joiner = trained(source_steps, amsgrad=True), trained(joiner_steps, amsgrad=True)
    weight = joiner.modules["net"].linear.weight.data_ptr()
    (sent, digest), (tree, received, seen) = together(
        lambda: transfer.send_source(pair[0].backend, 1, source, {"hello": 1}),
        lambda: transfer.receive_source(pair[1].backend, 0, joiner),
    )
    assert (sent, digest, tree["hello"]) == (received, seen, 1)
    assert equal(contents(source), contents(joiner))
    assert source.rest() == joiner.rest()
    assert joiner.modules["net"].linear.weight.data_ptr() == weight
    joiner.put_objects(source.encoded_objects())
    assert joiner.objects["schedule"].state_dict() == source.objects["schedule"].state_dict()
    assert joiner.signature() == source.signature()


@pytest.mark.parametrize("sizes", [[], [0, 5], [(1 << 20) - 1] * 40, [3, 100 << 20, 7, 1 << 20, 64 << 20]])
def test_parts_cover_every_byte_once(sizes: list[int]) -> None:
    numbers = range(len(sizes))
    parts = list(image.parts_of(sizes, [n % 3 != 1 for n in numbers], ["cuda" if n % 2 else "cpu" for n in numbers]))
    assert all(len({(span.tensor % 3 == 1, span.tensor % 2) for span in part}) == 1 for part in parts)
    seen: dict[int, int] = dict.fromkeys(range(len(sizes)), 0)
    for tensor, start, end in sorted(span for part in parts for span in part):
        assert start == seen[tensor] < end
        seen[tensor] = end
    assert list(seen.values()) == sizes
    assert all(sum(s.end - s.start for s in part) <= image.PART for part in parts)
    assert all(len(part) == 1 or max(s.end - s.start for s in part) < 1 << 20 for part in parts)


class Odd(torch.nn.Module):
    """Large and small, in parts and whole, strided, of one byte, misaligned in its storage, empty."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.randn(3_000_001)
        for name, tensor in {
            "huge": torch.randn(9_000_000),
            "strided": torch.randn(1200, 900).t(),
            "bytes": torch.randint(0, 255, (1_500_001,), dtype=torch.uint8),
            "odd": shared[1:],
            "small": torch.randn(3),
            "empty": torch.empty(0),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
        }.items():
            self.register_buffer(name, tensor)


def test_tensors_of_every_shape_arrive_in_place_and_are_told_of(pair: Any) -> None:
    states = [State(modules={"odd": Odd()}), State(modules={"odd": Odd()})]
    places = {k: t.data_ptr() for k, t in states[1].tensors()["odd"].items()}
    told: list[tuple[int, int]] = []
    (sent, _), (_, received, _) = together(
        lambda: transfer.send_source(pair[0].backend, 1, states[0], {}),
        lambda: transfer.receive_source(pair[1].backend, 0, states[1], told=lambda *progress: told.append(progress)),
    )
    assert equal(contents(states[0]), contents(states[1]))
    assert {k: t.data_ptr() for k, t in states[1].tensors()["odd"].items()} == places
    assert sent == received
    assert len(told) > 3
    assert told[-1][0] == told[-1][1] == sum(t.nbytes for t in states[0].tensors()["odd"].values()) + (-12 % 16) + (-8 % 16)


class Counting:
    """A backend that says how much went through it, and how much of that it read or wrote in place."""

    def __init__(self, inner: Any, owned: State) -> None:
        self._inner, self._places = inner, {t.untyped_storage().data_ptr() for t in owned.tensors()["odd"].values()}
        self.bytes = self.in_place = 0

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._count(tensors[0])
        return Queued(self._inner.send(tensors, rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._count(tensors[0])
        return Queued(self._inner.recv(tensors, rank, tag))

    def _count(self, tensor: torch.Tensor) -> None:
        self.bytes += tensor.nbytes
        self.in_place += tensor.untyped_storage().data_ptr() in self._places and tensor.nbytes


@pytest.mark.parametrize("world", [2], indirect=True)
def test_what_a_device_holds_goes_from_device_to_device(world: list[comm.Communicator], pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors straight from and into their memory; beside them the receiver needs room for the parts that are under way only."""
    monkeypatch.setattr(image, "PART", 1 << 20)
    states = [State(modules={"odd": Odd()}), State(modules={"odd": Odd()})]
    own = [Counting(end.backend, state) for end, state in zip(pair, states, strict=True)]
    room: list[int] = []
    plain = image.Image._buffer

    def counted(*args: Any) -> torch.Tensor:
        buffer = plain(*args)
        room.append(buffer.nbytes)
        return buffer

    monkeypatch.setattr(image.Image, "_buffer", counted)
    together(
        lambda: transfer.send_source(world[0].backend, 1, states[0], {}, direct={"cpu": own[0]}),  # type: ignore[dict-item]
        lambda: transfer.receive_source(world[1].backend, 0, states[1], direct={"cpu": own[1]}),  # type: ignore[dict-item]
    )
    assert equal(contents(states[0]), contents(states[1]))
    size = sum(t.nbytes for t in states[0].tensors()["odd"].values())
    assert own[0].bytes == own[1].bytes and size <= own[0].bytes < size + 64
    strided = states[0].modules["odd"].strided.nbytes
    assert own[0].in_place == own[1].in_place > size - strided - 100
    assert sum(room) < 200, "only what is small was packed"


@pytest.mark.parametrize("world", [4], indirect=True)
def test_several_sources_each_send_a_share(world: list[comm.Communicator], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and optimizer come from all, buffers from the first, though they differ."""
    monkeypatch.setattr(image, "PART", 256)
    monkeypatch.setattr(image, "_LARGE", 64)
    torch.manual_seed(0)
    states = [trained(2, width=40) for _ in range(4)]
    for replica in states[1:3]:
        transfer.unpack(replica, transfer.pack(states[0], {})[0])
        replica.modules["net"].norm.running_mean.fill_(7)
    sent = together(
        lambda: transfer.send_source(world[0].backend, 3, states[0], {}, sources=(0, 1, 2))[0],
        lambda: transfer.send_share(world[1].backend, 3, states[1], 3, 1),
        lambda: transfer.send_share(world[2].backend, 3, states[2], 3, 2),
        lambda: transfer.receive_source(world[3].backend, 0, states[3])[1],
    )
    assert sum(sent[:3]) == sent[3]
    assert min(sent[1:3]) > 500
    assert equal(contents(states[0]), contents(states[3]))


@pytest.mark.parametrize("world", [2], indirect=True)
def test_whoever_receives_over_a_device_hears_on_the_cpu_that_its_source_has_gone(world: list[comm.Communicator]) -> None:
    """Its parts never come, and nobody says so."""
    states = [State(modules={"odd": Odd()}), State(modules={"odd": Odd()})]
    under_way = SimpleNamespace(is_completed=lambda: False)
    never = SimpleNamespace(send=lambda *_: under_way, recv=lambda *_: under_way)

    def send() -> None:
        with pytest.raises(RuntimeError):
            transfer.send_source(world[0].backend, 1, states[0], {}, timedelta(seconds=0.5), direct={"cpu": never})  # type: ignore[dict-item]
        world[0].connection.close()

    def receive() -> None:
        with pytest.raises(RuntimeError, match="rank 0 has gone"):
            transfer.receive_source(world[1].backend, 0, states[1], timedelta(seconds=60), direct={"cpu": never})  # type: ignore[dict-item]

    began = time.monotonic()
    together(send, receive)
    assert time.monotonic() - began < 30


def test_damage_on_the_way_is_noticed(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = trained(1), trained(1)
    sums, wire_digest = values.sums, []

    def flipped(part: torch.Tensor) -> bytes:
        wire_digest.append(part.numel())
        if len(wire_digest) == 1:  # whoever sums first sees another bit
            part = part.clone()
            part[17] ^= 4
        return sums(part)

    monkeypatch.setattr(values, "sums", flipped)
    with pytest.raises(dist.DistBackendError, match="arrived damaged"):
        together(
            lambda: transfer.send_source(pair[0].backend, 1, source, {}),
            lambda: transfer.receive_source(pair[1].backend, 0, target),
        )


@pytest.mark.parametrize("size", [1, 7, 8192, 8193, 100_000])
def test_a_sum_sees_every_byte(size: int) -> None:
    part = torch.randint(0, 255, (size,), dtype=torch.uint8)
    before = values.sums(part)
    for place in {0, size // 2, size - 1}:
        part[place] ^= 1
        assert values.sums(part) != before
        part[place] ^= 1
    assert values.sums(part) == before


def test_another_layout_is_an_error_that_names_the_tensor() -> None:
    with pytest.raises(WorkerError, match=r"net\.linear\.weight is \(6, 3\) torch\.float32 here, \(5, 3\)"):
        trained(1, width=6).adopt(trained(1).layout())
    with pytest.raises(WorkerError, match=r"net\.hidden exists only in the running job"):
        layout = trained(0).layout()
        plain = trained(0)
        del plain.modules["net"]._buffers["hidden"]
        plain.adopt(layout)


def test_a_rollback_undoes_a_step() -> None:
    state = trained(2)
    snapshot, before = state.snapshot(), contents(state)
    drawn = (torch.rand(1).item(), random.random(), numpy.random.rand())
    state.modules["net"](torch.rand(8, 3)).sum().backward()
    state.objects["schedule"].last_epoch = 17
    assert not equal(before, contents(state))
    state.rollback(snapshot)
    assert equal(before, contents(state))
    assert not any(p.grad.any() for p in state.modules["net"].parameters())
    assert state.objects["schedule"].last_epoch == 2
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == drawn


def test_a_buffer_that_was_registered_later_is_rolled_back_too() -> None:
    state = trained(1)
    state.snapshot()
    net = state.modules["net"]
    net.add_module("late", torch.nn.BatchNorm1d(5))
    net.linear.register_buffer("mask", torch.zeros(2))
    snapshot, before = state.snapshot(), contents(state)
    net.late(torch.rand(8, 5))
    net.linear.mask = torch.ones(2)
    net.linear.mask.add_(1)
    assert not equal(before, contents(state))
    state.rollback(snapshot)
    assert equal(before, contents(state))


def test_random_state_comes_back() -> None:
    random.gauss(0, 1)
    state = rng.capture()
    drawn = (torch.rand(3).tolist(), random.gauss(0, 1), random.random(), numpy.random.randn(3).tolist())
    rng.restore(state)
    assert rng.decode(rng.encode(state))["python"] == state["python"]
    rng.restore(rng.decode(rng.encode(state)))
    assert (torch.rand(3).tolist(), random.gauss(0, 1), random.random(), numpy.random.randn(3).tolist()) == drawn


def test_captured_states_are_those_of_the_moment() -> None:
    """Also when what was captured last is given again: whoever draws, and whatever was kept for later, is seen."""

    def same() -> bool:
        now, name = numpy.random.get_state(), rng.capture()
        assert name["python"] == random.getstate()
        assert (now[1] == name["numpy"][1]).all() and now[2:] == name["numpy"][2:]
        assert rng.decode(rng.encode(name))["numpy"][2:] == now[2:]
        assert torch.equal(rng.decode(rng.encode(name))["torch"], torch.get_rng_state())
        return True

    draws: list[Callable[[], object]] = [
        random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), numpy.random.rand, numpy.random.randn, numpy.random.randn,
        lambda: numpy.random.seed(7), lambda: torch.rand(1), lambda: random.seed(3), lambda: numpy.random.randint(9),
        lambda: numpy.random.set_state(numpy.random.RandomState(9).get_state()),
    ]  # fmt: skip
    for draw in draws * 3:
        assert same() and same()
        draw()
    while not numpy.random.get_state()[3]:
        numpy.random.randn()
    kept = rng.capture()  # a normal number is kept for later: it can be taken, and put back, without a draw
    numpy.random.randn()
    assert same()
    rng.restore(kept)
    assert same() and numpy.random.get_state()[3]


def test_what_differed_between_the_ranks_is_the_lost_ranks_own() -> None:
    own = {"schedule": b"vote", "data": b"mine"}
    assert handover.merge({"schedule": b"now", "data": b"theirs"}, {"schedule": b"vote", "data": b"theirs"}, own) == {
        "schedule": b"now",
        "data": b"mine",
    }


# -- stores -------------------------------------------------------------------------------------------------------------------------
def test_the_agents_store_behaves_like_torchs(agent: FakeAgent) -> None:
    client = AgentStore(agent.path, 0)
    store = dist.PrefixStore("p", client)
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5")
    assert store.check(["k", "n"])
    assert not store.check(["k", "absent"])
    assert store.compare_set("k", "v", "w") == b"w"
    assert store.compare_set("k", "v", "x") == b"w"
    store.wait(["k"], timedelta(seconds=1))
    assert store.delete_key("k")
    assert not store.delete_key("k")
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.wait(["absent"], timedelta(seconds=0.05))
    client.dispose()


def test_closing_a_store_wakes_who_waits_in_it(agent: FakeAgent) -> None:
    store = AgentStore(agent.path, 0)
    closer = threading.Timer(0.1, store.close)
    closer.start()
    with pytest.raises(dist.DistNetworkError, match="closed"):
        store.get("never")
    closer.join()
    store.dispose()


def test_gloo_meets_through_the_agent_and_a_switched_store(agent: FakeAgent) -> None:
    stores = [SwitchStore(dist.HashStore()) for _ in range(2)]
    clients = [AgentStore(agent.path, rank) for rank in range(2)]
    for store, client in zip(stores, clients, strict=True):
        store.inner = client
    ends = together(
        *(lambda r=r: comm.build(comm.CONTROL, dist.PrefixStore("g", stores[r]), r, 2, timedelta(seconds=30)) for r in range(2))
    )
    assert all(end.connection.sockets for end in ends)
    for client in clients:
        client.dispose()


# -- outside tmrun ------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def alone() -> Iterator[None]:
    HOLDER.joined = False
    yield
    HOLDER.joined = False


@pytest.mark.usefixtures("alone")
def test_outside_tmrun_the_loop_is_a_range() -> None:
    run = api.join(net=Net())
    seen = []
    for step in run.steps(3):
        with step:
            seen.append(step + 0)
            assert not step.committed
        assert step.committed
    assert seen == [0, 1, 2]
    assert not run.rehearsing
    assert [f"{s}" for s in seen] == ["0", "1", "2"]


@pytest.mark.usefixtures("alone")
def test_misuse() -> None:
    with pytest.raises(WorkerError, match=r"join\(lr=\.\.\.\): a float has no state_dict"):
        api.join(lr=0.1)
    run = api.join()
    with pytest.raises(WorkerError, match="called twice"):
        api.join()
    with pytest.raises(WorkerError, match="ran outside `with step:`"):
        list(run.steps(1))
    (first, *_) = (step for step in [next(run.steps(1))])
    with pytest.raises(WorkerError, match="begins inside step 0"), first, first:
        pass
    (again, *_) = (step for step in [next(api.Run(api.Plain()).steps(1))])
    with again:
        pass
    with pytest.raises(WorkerError, match="step 0 is entered twice"), again:
        pass
    with pytest.raises(ValueError, match="the user's own"), next(api.Run(api.Plain()).steps(1)) as step:
        raise ValueError("the user's own")
    assert not step.committed
