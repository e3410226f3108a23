"""Random histories run on the model and on a real etcd: every answer, every key and every watch event must be the same."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_lab import Seen, eventually

from tmrun.core.errors import StoreError
from tmrun.core.txn import Absent, CreatedAt, Delete, DeletePrefix, ModifiedAt, Put, Txn, ValueIs
from tmrun.store.api import Changed, Store
from tmrun.store.embedded import EmbeddedEtcd
from tmrun.store.etcd import EtcdStore
from tmrun.store.memory import MemoryWorld

names = st.sampled_from(["a", "a/1", "a/2", "b"])
values = st.sampled_from(["", "1", "2"])
revisions = st.integers(0, 12)  # 0: absent; else counted from the first revision of the run
leases = st.sampled_from([None, 0, 1])  # which of two
guards = st.one_of(
    st.tuples(st.just(Absent), names),
    st.tuples(st.just(CreatedAt), names, revisions),
    st.tuples(st.just(ModifiedAt), names, revisions),
    st.tuples(st.just(ValueIs), names, values),
)
puts = st.tuples(st.just(Put), names, values, leases)
ops = st.one_of(puts, puts, puts, st.tuples(st.just(Delete), names), st.tuples(st.just(DeletePrefix), names))
commits = st.tuples(st.just("commit"), st.one_of(st.just([]), st.lists(guards, max_size=2)), st.lists(ops, min_size=1, max_size=3))
revokes = st.tuples(st.just("revoke"), st.sampled_from([0, 1]))
histories = st.lists(st.one_of(commits, commits, commits, revokes), min_size=3, max_size=14)


@pytest.fixture(scope="module")
def quiet_etcd() -> Iterator[EtcdStore]:
    """One that nobody else makes revisions in."""
    with EmbeddedEtcd() as etcd:
        store = EtcdStore(etcd.endpoint)
        yield store
        store.close()


def run(store: Store, prefix: str, history: list[Any]) -> list[object]:
    """Everything observable, with revisions relative to the start."""
    base = store.list(prefix).revision
    lease_ids = [store.grant(600), store.grant(600)]
    seen = Seen()
    watch = store.watch(prefix, seen)
    eventually(lambda: seen.resyncs)
    told: list[object] = []

    def guard(kind: Any, name: str, *rest: Any) -> Any:
        if kind in (CreatedAt, ModifiedAt):
            rest = (rest[0] and rest[0] + base,)
        return kind(prefix + name, *rest)

    def op(kind: Any, name: str, *rest: Any) -> Any:
        if kind is Put:
            rest = (rest[0], 0 if rest[1] is None else lease_ids[rest[1]])
        return kind(prefix + name, *rest)

    for step in history:
        if step[0] == "revoke":
            store.revoke(lease_ids[step[1]])
            continue
        try:
            result = store.commit(Txn(tuple(guard(*g) for g in step[1]), tuple(op(*o) for o in step[2])))
            told.append((result.succeeded, result.revision - base))
        except StoreError as error:
            told.append(type(error).__name__)
    listing = store.list(prefix)
    told.append(listing.revision - base)

    def plain(kv: Any) -> object:
        lease = lease_ids.index(kv.lease) if kv.lease else None
        return kv and (kv.key[len(prefix) :], kv.value, kv.create_revision - base, kv.mod_revision - base, kv.version, lease)

    told.extend(map(plain, listing.entries))
    store.put(prefix + "z", "the end")
    eventually(lambda: seen.changes and seen.changes[-1][0] == prefix + "z")
    watch.close()
    told.extend((e.key[len(prefix) :], e.value and plain(e.value), e.revision - base) for e in seen.events if isinstance(e, Changed))
    return told


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=histories)
def test_the_model_is_etcd(quiet_etcd: EtcdStore, history: list[Any]) -> None:
    prefix = f"/{uuid.uuid4().hex}/"
    assert run(MemoryWorld().client(), prefix, history) == run(quiet_etcd, prefix, history)
