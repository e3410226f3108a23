"""The model's own controls: time, partitions, lost answers, watch events that a test holds back or repeats."""

from __future__ import annotations

import pytest

from tmrun.core.errors import OutcomeUnknown, StoreUnavailable
from tmrun.core.txn import Absent, Put, Txn
from tmrun.store.api import Changed, Resync, Store, WatchEvent
from tmrun.store.memory import RELIST_S, Fate, MemoryStore, MemoryWorld


def static_check(store: MemoryStore) -> Store:
    return store


def test_a_lease_expires_exactly_at_its_ttl() -> None:
    world = MemoryWorld()
    store = world.client()
    store.put("a", "v", store.grant(5))
    world.advance(4.999)
    assert store.get("a") is not None
    world.advance(0.001)
    assert store.get("a") is None


def test_a_partition_cuts_calls_renewals_and_events() -> None:
    world = MemoryWorld()
    cut, other = world.client("cut"), world.client("other")
    events: list[WatchEvent] = []
    lost: list[str] = []
    lease = cut.grant(5)
    cut.put("a", "v", lease)
    alive = cut.keep_alive(lease, 5, lambda: lost.append("it"))
    world.advance(20)
    assert other.get("a") is not None
    renewed = alive.last_renewed
    cut.watch("", events.append)
    cut.partitioned = True
    with pytest.raises(StoreUnavailable):
        cut.commit(Txn((), ()))
    world.advance(4)
    assert other.get("a") is not None
    world.advance(2)
    assert other.get("a") is None
    assert (alive.last_renewed, alive.lost, lost, len(events)) == (renewed, False, [], 1)
    cut.partitioned = False
    assert (alive.lost, lost) == (True, ["it"])
    assert [event.key for event in events[1:] if isinstance(event, Changed)] == ["a"]


def test_a_short_partition_costs_no_lease() -> None:
    world = MemoryWorld()
    store = world.client()
    lease = store.grant(5)
    store.put("a", "v", lease)
    alive = store.keep_alive(lease, 5, lambda: None)
    world.advance(1)
    store.partitioned = True
    world.advance(4)
    store.partitioned = False
    assert alive.last_renewed == world.clock()
    world.advance(30)
    assert store.get("a") is not None


@pytest.mark.parametrize(("fate", "applied"), [(Fate.APPLIED_UNANSWERED, True), (Fate.LOST, False)])
def test_lost_answers(fate: Fate, applied: bool) -> None:
    store = MemoryWorld().client()
    store.next_commits(Fate.ANSWERED, fate)
    store.commit(Txn((), (Put("first", "v"),)))
    with pytest.raises(OutcomeUnknown):
        store.commit(Txn((Absent("a"),), (Put("a", "v"),)))
    assert (store.get("a") is not None) == applied
    assert store.commit(Txn((Absent("a"),), (Put("a", "v"),))).succeeded != applied


def test_events_wait_for_the_pump_and_may_repeat() -> None:
    world = MemoryWorld(auto=False)
    store = world.client()
    events: list[WatchEvent] = []
    watch = store.watch("", events.append)
    assert (world.pump(), len(events)) == (1, 1)
    store.put("a", "1")
    store.put("a", "2")
    assert (watch.pending, len(events)) == (2, 1)
    watch.deliver()
    watch.duplicate()
    assert events[1] == events[2]
    world.compact()
    assert world.pump() == 1
    assert isinstance(events[-1], Resync)
    assert [kv.value for kv in events[-1].listing.entries] == ["2"]


def test_a_callback_that_writes_keeps_the_order() -> None:
    store = MemoryWorld().client()
    seen: list[str] = []

    def echo(event: WatchEvent) -> None:
        if isinstance(event, Changed) and event.key == "question":
            store.put("answer", "v")
            seen.append("asked")
        elif isinstance(event, Changed):
            seen.append(event.key)

    store.watch("", echo)
    store.put("question", "v")
    assert seen == ["asked", "answer"]


def test_watches_list_anew_from_time_to_time() -> None:
    world = MemoryWorld()
    events: list[WatchEvent] = []
    world.client().watch("", events.append)
    world.advance(3 * RELIST_S)
    assert len(events) == 4


def test_a_crashed_client_renews_no_more() -> None:
    world = MemoryWorld()
    crashed, other = world.client(), world.client()
    lease = crashed.grant(5)
    crashed.put("a", "v", lease)
    crashed.keep_alive(lease, 5, lambda: None)
    world.advance(60)
    crashed.crash()
    world.advance(5)
    assert other.get("a") is None
