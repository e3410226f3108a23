"""Copies in partners' memory: who keeps whose, which are safe, what a lost connection costs, what they cost."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from trials import STEP, Trials

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.worker import courier, snapshot, tcp, vote
from tmrun.worker.snapshot import Snapshots
from tmrun.worker.state import State
from tmrun.worker.transfer import Parcel

DEADLINE_S = 20.0
SIGNATURES = (b"a", b"b", b"c")


class Store:
    """One dict for all ranks, closed a client at a time."""

    def __init__(self, values: dict[str, bytes], changed: threading.Condition) -> None:
        self.values, self.changed, self.closed = values, changed, False

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or key in self.values)
            if self.closed:
                raise RuntimeError("closed")
            return self.values[key]

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    dispose = close


class Ranks:
    def __init__(self, world: int) -> None:
        self.values: dict[str, bytes] = {}
        changed = threading.Condition()
        open_store: Any = lambda: Store(self.values, changed)  # noqa: E731
        self.told: list[wire.Copied] = []
        self.all = [Snapshots(open_store, self.told.append) for _ in range(world)]
        self.states = [State({"model": torch.nn.Linear(8, 8)}) for _ in range(world)]
        for rank, each in enumerate(self.all):
            each.place(rank, world, 1)

    def vote(self, step: int, step_s: float = 1.0) -> None:
        tallies = [vote.Tally.of(vote.Ballot(step, held=r.held, every=r.every(step_s))) for r in self.all]
        for each in self.all:
            each.agree(functools.reduce(vote.Tally.with_, tallies), SIGNATURES)

    def take(self, step: int) -> None:
        for each, state in zip(self.all, self.states, strict=True):
            assert each.is_due(step)
            each.take("s", step, state, {"step": step})

    def addresses(self) -> list[str]:
        """Of their couriers."""
        return [value.decode() for value in self.values.values()]

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    for each in made.all:
        each.stop()


@pytest.mark.parametrize(("world", "local", "partner"), [(4, 2, 3), (4, 4, 3), (2, 1, 0), (6, 2, 3), (16, 2, 9)])
def test_the_partner_is_on_another_node(world: int, local: int, partner: int) -> None:
    assert snapshot.partner_of(1, world, local) == partner
    assert sorted(snapshot.partner_of(r, world, local) for r in range(world)) == list(range(world))


@pytest.mark.parametrize("rack", [1, 2, 3, 4])
@pytest.mark.parametrize("racks", [2, 3, 4])
def test_a_rack_does_not_hold_its_own_copies(rack: int, racks: int) -> None:
    """Neighbouring nodes, as hosts are numbered."""
    local = 2
    for rank in range(rack * racks * local):
        assert snapshot.partner_of(rank, rack * racks * local, local) // local // rack != rank // local // rack


def test_only_where_somebody_has_no_replica() -> None:
    assert snapshot.needed((b"a", b"a", b"b"))
    assert not snapshot.needed((b"a", b"b", b"a", b"b"))
    assert not snapshot.needed((b"a",))


def test_taken_sent_and_agreed(ranks: Ranks) -> None:
    ranks.vote(1)
    assert not any(r.is_due(2) for r in ranks.all)
    ranks.vote(2)
    ranks.take(3)
    ranks.wait(lambda: all(r.held == 3 for r in ranks.all))
    assert [r.holdings() for r in ranks.all] == [{3: (0, 2)}, {3: (1, 0)}, {3: (2, 1)}]
    whole = ranks.all[0].copy_of(0, 3)
    copied = ranks.all[1].copy_of(0, 3)
    assert (copied.body, [b.tolist() for b in copied.buckets]) == (whole.body, [b.tolist() for b in whole.buckets])
    ranks.wait(lambda: len(ranks.told) == 3)
    assert {(c.step, c.copies.bytes) for c in ranks.told} == {(3, len(whole.body) + sum(b.nbytes for b in whole.buckets))}
    assert all(c.copies.copy_s > 0 and c.copies.send_s > 0 for c in ranks.told)


def test_the_last_safe_one_stays_until_the_next_is_safe(ranks: Ranks) -> None:
    for each in ranks.all:
        each.configured = 2
    ranks.vote(2)
    ranks.take(3)
    ranks.wait(lambda: all(r.held == 3 for r in ranks.all))
    ranks.vote(3)
    assert not ranks.all[0].is_due(4)
    ranks.vote(4)
    ranks.take(5)
    assert all(3 in r.holdings() for r in ranks.all)
    ranks.wait(lambda: all(r.held == 5 for r in ranks.all))
    ranks.vote(6)
    ranks.take(7)
    assert all(set(r.holdings()) == {5, 7} or set(r.holdings()) == {5} for r in ranks.all)


def test_slow_sending_delays_the_next(ranks: Ranks) -> None:
    """Nobody waits for it: it is only not due."""
    ranks.vote(2)
    *quick, slow = ranks.all
    for each, state in zip(quick, ranks.states, strict=False):
        each.take("s", 3, state, {})
    ranks.vote(3)
    assert not any(r.is_due(4) for r in quick)
    slow.take("s", 3, ranks.states[2], {})
    ranks.wait(lambda: all(r.held == 3 for r in ranks.all))
    ranks.vote(4, step_s=1e9)
    assert all(r.is_due(5) for r in ranks.all)


def test_after_a_switch_what_is_safe_stays(ranks: Ranks) -> None:
    ranks.vote(2)
    ranks.take(3)
    ranks.wait(lambda: all(r.held == 3 for r in ranks.all))
    for each in ranks.all:
        each.switched("t", 3, SIGNATURES)
    assert all(r.is_due(3) and r.held == -1 and 3 in r.holdings() for r in ranks.all)


def test_how_often() -> None:
    taken = Snapshots(lambda: pytest.fail("no store"))
    assert taken.every(0.0) == 1
    taken._copy_s, taken._send_s = 0.03, 0.05
    assert [taken.every(step_s) for step_s in (0.1, 1.0, 100.0)] == [80, 8, 1]
    taken.configured = 5
    assert taken.every(0.1) == 5


def test_asked_for_by_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot.every_from_environment() is None
    monkeypatch.setenv(wire.ENV_SNAPSHOT_EVERY, "4")
    assert snapshot.every_from_environment() == 4
    monkeypatch.setenv(wire.ENV_SNAPSHOT_EVERY, "often")
    with pytest.raises(WorkerError, match="often"):
        snapshot.every_from_environment()


def test_a_damaged_parcel_is_refused() -> None:
    left, right = courier.socket.socketpair()
    with left, right:
        parcel = Parcel(b"tree", [torch.arange(100, dtype=torch.uint8)])
        courier.send_parcel(left, 3, parcel)
        sent = bytearray(right.recv(1 << 16))
        sent[-1] ^= 1
        left.sendall(sent)
        with pytest.raises(ValueError, match="damaged"):
            courier.receive_parcel(right)


def test_a_partner_is_reached_at_the_chosen_address_only(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(tcp, "_of_name", lambda: "127.0.0.2")
    ranks.vote(2)
    ranks.take(3)
    ranks.wait(lambda: all(r.held == 3 for r in ranks.all))
    for published in ranks.addresses():
        host, port, _ = published.rsplit(":", 2)
        assert host == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            courier.socket.create_connection(("127.0.0.1", int(port)))


@pytest.mark.parametrize(
    ("chosen", "told"), [("lo", "127.0.0.1"), ("lo,nosuch0", "127.0.0.1"), ("nosuch0", "127.0.0.1"), (None, "127.0.0.3")]
)
def test_the_address_for_peers(monkeypatch: pytest.MonkeyPatch, chosen: str | None, told: str) -> None:
    monkeypatch.setattr(tcp, "_of_name", lambda: "127.0.0.3")
    if chosen is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    assert tcp.own() == told
    with tcp.listen(backlog=1) as listener:
        assert listener.getsockname()[0] == told


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ([(socket.AF_INET6, "2001:db8::7"), (socket.AF_INET, "192.0.2.7")], "192.0.2.7"),
        ([(socket.AF_INET6, "2001:db8::7")], "2001:db8::7"),
        ([], "127.0.0.1"),
        (None, "127.0.0.1"),
    ],
)
def test_the_address_of_the_host_name(monkeypatch: pytest.MonkeyPatch, known: list[tuple[int, str]] | None, told: str) -> None:
    def resolve(*_: object, **__: object) -> list[Any]:
        if known is None:
            raise socket.gaierror("Name or service not known")
        return [(family, socket.SOCK_STREAM, 6, "", (host, 0)) for family, host in known]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert tcp.own() == told


# -- in jobs ------------------------------------------------------------------------------------------------------------------------
def test_two_losses_one_after_the_other(trials: Trials) -> None:
    """The second rank dies after everybody went back; its copy was taken after the first switch."""
    job = trials.make("fsdp2", 3, TMRUN_TEST_KILL=f"1:{STEP}:backward,2:{STEP + 2}:after_vote", TMRUN_SNAPSHOT_EVERY="2")
    joiners = {1: job.standby(1), 2: job.standby(2)}
    job.start()
    job.died(1)
    assert job.heal({1: joiners[1]}) <= STEP
    job.died(2)
    job.heal({2: joiners[2]})
    trials.same(job, unlogged=((2, STEP + 2),))


def test_nothing_is_copied_where_replicas_exist(trials: Trials) -> None:
    job = trials.make("ddp", TMRUN_TEST_KILL=f"1:{STEP}:backward", TMRUN_SNAPSHOT_EVERY="1")
    joiner = job.standby(1)
    job.start()
    job.died(1)
    job.heal({1: joiner})
    assert not job.expect(job.ranks[0], wire.Prepared).snapshots
    trials.same(job)


def another_interface() -> tuple[str, str]:
    """Name and address; not the one that is taken if nobody chooses."""
    usual = socket.gethostbyname(socket.gethostname())
    found = [(name, a.address) for name, of in psutil.net_if_addrs().items() for a in of if a.family is socket.AF_INET]
    return next((name, address) for name, address in found if address != usual)


def test_all_goes_over_the_chosen_interface(trials: Trials) -> None:
    """Gradients, votes, the state of a rank that moves, copies."""
    name, where = another_interface()
    job = trials.make("fsdp2", TMRUN_SNAPSHOT_EVERY="2", TEST_PACE_S="0.1", GLOO_SOCKET_IFNAME=name)
    joiner = job.standby(1)
    job.start()
    job.reach(4)
    job.drain(1, joiner)
    job.expect(joiner, wire.Resumed)
    connections = [c for w in job.ranks.values() for c in psutil.Process(w.pid).net_connections("tcp")]
    (job.losses / "fast").touch()
    job.finish()
    assert len(connections) > 4
    assert {c.laddr.ip for c in connections} == {where}
