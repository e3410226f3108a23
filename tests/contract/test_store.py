"""What every store does, said once and run on the model and on a real etcd."""

from __future__ import annotations

import time

import pytest
from store_lab import Lab, Seen

from tmrun.core.errors import LeaseGone, StoreError
from tmrun.core.txn import MAX_TXN_OPS, Absent, CreatedAt, Delete, DeletePrefix, Guard, KeyValue, ModifiedAt, Put, Txn, ValueIs


def put(lab: Lab, name: str, value: str = "v", lease: int = 0) -> KeyValue:
    lab.store.put(lab.key(name), value, lease)
    kv = lab.store.get(lab.key(name))
    assert kv is not None
    return kv


def commits(lab: Lab, *guards: Guard) -> bool:
    """Whether the guards hold; the operation shows that they decide alone."""
    before = lab.store.get(lab.key("mark"))
    result = lab.store.commit(Txn(guards, (Put(lab.key("mark"), "x"),)))
    assert (lab.store.get(lab.key("mark")) != before) == result.succeeded
    return result.succeeded


# --- reads and revisions


def test_absent_key(lab: Lab) -> None:
    assert lab.store.get(lab.key("nothing")) is None
    assert lab.store.list(lab.key("nothing")).entries == ()


def test_revisions_of_a_key(lab: Lab) -> None:
    first, second = put(lab, "a", "1"), put(lab, "a", "2")
    assert (first.value, first.version, first.create_revision) == ("1", 1, first.mod_revision)
    assert (second.value, second.version, second.create_revision) == ("2", 2, first.create_revision)
    assert second.mod_revision == first.mod_revision + 1
    lab.store.commit(Txn((), (Delete(lab.key("a")),)))
    again = put(lab, "a", "3")
    assert again.version == 1
    assert again.create_revision == again.mod_revision == second.mod_revision + 2


def test_listing_is_sorted_and_keeps_to_its_prefix(lab: Lab) -> None:
    for name in ("b/2", "b/10", "b", "b0", "a", "c", "b/é", "b/~"):
        put(lab, name, name)
    both = lab.store.list_all([lab.key("b/"), lab.key("a")])
    assert [kv.key for kv in both.entries if kv.key.startswith(lab.key("b/"))] == [kv.key for kv in lab.store.list(lab.key("b/")).entries]
    assert {kv.key for kv in both.entries} == {kv.key for p in ("b/", "a") for kv in lab.store.list(lab.key(p)).entries}
    assert both.revision <= lab.store.list(lab.key("b/")).revision
    listing = lab.store.list(lab.key("b/"))
    assert [kv.key for kv in listing.entries] == [lab.key(name) for name in ("b/10", "b/2", "b/~", "b/é")]
    assert listing.revision >= max(kv.mod_revision for kv in listing.entries)


def test_values_are_any_text(lab: Lab) -> None:
    for value in ("", "\0", "ünïcode ✓", "x" * 100_000):
        assert put(lab, "value", value).value == value


def test_one_transaction_is_one_revision(lab: Lab) -> None:
    put(lab, "old")
    before = lab.store.list(lab.prefix).revision
    result = lab.store.commit(Txn((), (Put(lab.key("a"), "1"), Put(lab.key("b"), "2"), Delete(lab.key("old")))))
    entries = lab.store.list(lab.prefix).entries
    assert result.succeeded
    assert result.revision == before + 1
    assert [(kv.key, kv.mod_revision) for kv in entries] == [(lab.key("a"), before + 1), (lab.key("b"), before + 1)]


def test_what_changes_nothing_makes_no_revision(lab: Lab) -> None:
    before = lab.store.list(lab.prefix).revision
    for txn in (
        Txn((), ()),
        Txn((), (Delete(lab.key("nothing")), DeletePrefix(lab.key("nothing/")))),
        Txn((ValueIs(lab.key("nothing"), ""),), (Put(lab.key("a"), "1"),)),
    ):
        lab.store.commit(txn)
    assert lab.store.list(lab.prefix).revision == before


# --- guards


def test_guard_absent(lab: Lab) -> None:
    assert commits(lab, Absent(lab.key("a")))
    put(lab, "a", "")
    assert not commits(lab, Absent(lab.key("a")))


def test_guard_created_at(lab: Lab) -> None:
    kv = put(lab, "a", "1")
    put(lab, "a", "2")
    assert commits(lab, CreatedAt(lab.key("a"), kv.create_revision))
    assert not commits(lab, CreatedAt(lab.key("a"), kv.create_revision + 1))
    lab.store.commit(Txn((), (Delete(lab.key("a")),)))
    put(lab, "a", "1")
    assert not commits(lab, CreatedAt(lab.key("a"), kv.create_revision))


def test_guard_modified_at(lab: Lab) -> None:
    kv = put(lab, "a", "1")
    assert commits(lab, ModifiedAt(lab.key("a"), kv.mod_revision))
    put(lab, "a", "1")
    assert not commits(lab, ModifiedAt(lab.key("a"), kv.mod_revision))


def test_guard_value_is(lab: Lab) -> None:
    put(lab, "a", "1")
    assert commits(lab, ValueIs(lab.key("a"), "1"))
    assert not commits(lab, ValueIs(lab.key("a"), "2"))
    assert not commits(lab, ValueIs(lab.key("absent"), ""))


def test_an_absent_key_has_revision_zero(lab: Lab) -> None:
    assert commits(lab, CreatedAt(lab.key("a"), 0), ModifiedAt(lab.key("a"), 0))
    assert not commits(lab, CreatedAt(lab.key("a"), 1))
    assert not commits(lab, ModifiedAt(lab.key("a"), 1))


def test_all_guards_must_hold(lab: Lab) -> None:
    put(lab, "a", "1")
    assert not commits(lab, ValueIs(lab.key("a"), "1"), Absent(lab.key("a")))


# --- operations and limits


def test_delete_prefix_keeps_to_its_prefix(lab: Lab) -> None:
    for name in ("b/1", "b/2", "b", "b0", "a/1"):
        put(lab, name)
    assert lab.store.commit(Txn((), (DeletePrefix(lab.key("b/")),))).succeeded
    assert [kv.key for kv in lab.store.list(lab.prefix).entries] == [lab.key(name) for name in ("a/1", "b", "b0")]


def test_the_largest_transaction_works(lab: Lab) -> None:
    keys = [lab.key(f"{i:03}") for i in range(MAX_TXN_OPS)]
    assert lab.store.commit(Txn(tuple(map(Absent, keys)), tuple(Put(key, "v") for key in keys))).succeeded
    assert len(lab.store.list(lab.prefix).entries) == MAX_TXN_OPS


def test_a_larger_one_cannot_be_built() -> None:
    with pytest.raises(AssertionError):
        Txn((), tuple(Put(str(i), "v") for i in range(MAX_TXN_OPS + 1)))


@pytest.mark.parametrize("second", [Put, lambda key, _: Delete(key), lambda key, _: DeletePrefix(key[:-1])])
def test_no_transaction_writes_a_key_twice(lab: Lab, second: type[Put]) -> None:
    key = lab.key("a")
    for ops in ((Put(key, "1"), second(key, "2")), (second(key, "2"), Put(key, "1"))):
        with pytest.raises(StoreError):
            lab.store.commit(Txn((), ops))
    assert lab.store.get(key) is None


def test_too_large_a_request_is_refused(lab: Lab) -> None:
    with pytest.raises(StoreError):
        lab.store.put(lab.key("a"), "x" * (1536 * 1024 + 1))
    assert lab.store.get(lab.key("a")) is None


# --- leases


def test_a_lease_expires_with_its_keys(lab: Lab) -> None:
    lease = lab.store.grant(1)
    assert put(lab, "a", lease=lease).lease == lease
    put(lab, "b", lease=lease)
    put(lab, "unleased")
    lab.eventually(lambda: [kv.key for kv in lab.store.list(lab.prefix).entries] == [lab.key("unleased")])


def test_a_kept_lease_outlives_its_ttl(lab: Lab) -> None:
    kept, control = lab.store.grant(2), lab.store.grant(3)
    put(lab, "kept", lease=kept)
    put(lab, "control", lease=control)
    lost: list[str] = []
    alive = lab.store.keep_alive(kept, 2, lambda: lost.append("kept"))
    granted_at = alive.last_renewed
    lab.eventually(lambda: lab.store.get(lab.key("control")) is None)
    assert lab.store.get(lab.key("kept")) is not None
    assert alive.last_renewed > granted_at
    assert not alive.lost
    alive.close()
    lab.eventually(lambda: lab.store.get(lab.key("kept")) is None)
    assert lost == []


def test_a_revoked_lease_is_lost_once(lab: Lab) -> None:
    lease = lab.store.grant(2)
    put(lab, "a", lease=lease)
    lost: list[str] = []
    alive = lab.store.keep_alive(lease, 2, lambda: lost.append("a"))
    lab.store.revoke(lease)
    assert lab.store.get(lab.key("a")) is None
    lab.eventually(lambda: alive.lost and lost)
    control = lab.store.grant(1)
    put(lab, "control", lease=control)
    lab.eventually(lambda: lab.store.get(lab.key("control")) is None)
    assert lost == ["a"]


def test_keeping_a_dead_lease_alive_says_lost(lab: Lab) -> None:
    lost: list[str] = []
    alive = lab.store.keep_alive(4711, 2, lambda: lost.append("it"))
    lab.eventually(lambda: lost)
    assert alive.lost
    assert alive.last_renewed == float("-inf")


def test_revoking_an_unknown_lease_is_no_error(lab: Lab) -> None:
    lab.store.revoke(4711)


def test_a_dead_lease_fails_the_whole_transaction(lab: Lab) -> None:
    lease = lab.store.grant(5)
    lab.store.revoke(lease)
    with pytest.raises(LeaseGone):
        lab.store.commit(Txn((), (Put(lab.key("a"), "1"), Put(lab.key("b"), "2", lease))))
    with pytest.raises(LeaseGone):
        lab.store.put(lab.key("b"), "2", lease)
    assert lab.store.list(lab.prefix).entries == ()


def test_a_dead_lease_does_not_matter_when_a_guard_fails(lab: Lab) -> None:
    assert not lab.store.commit(Txn((ValueIs(lab.key("a"), "1"),), (Put(lab.key("a"), "1", 4711),))).succeeded


def test_a_put_moves_its_key_to_the_new_lease_or_to_none(lab: Lab) -> None:
    first, second = lab.store.grant(60), lab.store.grant(60)
    put(lab, "a", lease=first)
    put(lab, "b", lease=first)
    assert put(lab, "a", lease=second).lease == second
    assert put(lab, "b").lease == 0
    lab.store.revoke(first)
    assert [kv.key for kv in lab.store.list(lab.prefix).entries] == [lab.key("a"), lab.key("b")]
    lab.store.revoke(second)
    assert [kv.key for kv in lab.store.list(lab.prefix).entries] == [lab.key("b")]


def test_a_deleted_key_made_anew_is_not_the_old_leases(lab: Lab) -> None:
    lease = lab.store.grant(60)
    put(lab, "a", lease=lease)
    lab.store.commit(Txn((), (Delete(lab.key("a")),)))
    put(lab, "a")
    lab.store.revoke(lease)
    assert lab.store.get(lab.key("a")) is not None


# --- watches


def watch(lab: Lab, prefix: str) -> Seen:
    seen = Seen()
    lab.store.watch(lab.key(prefix), seen)
    lab.eventually(lambda: seen.resyncs)
    return seen


def test_a_watch_begins_with_everything(lab: Lab) -> None:
    put(lab, "w/a", "1")
    seen = watch(lab, "w/")
    assert isinstance(seen.events[0].listing.entries[0], KeyValue)  # type: ignore[union-attr]
    assert seen.fold() == {lab.key("w/a"): "1"}


def test_a_watch_tells_every_change_in_order(lab: Lab) -> None:
    seen = watch(lab, "w/")
    for value in map(str, range(20)):
        put(lab, "w/a", value)
    lab.store.commit(Txn((), (Delete(lab.key("w/a")), Put(lab.key("w/b"), "1"))))
    expected = [(lab.key("w/a"), str(i)) for i in range(20)] + [(lab.key("w/a"), None), (lab.key("w/b"), "1")]
    lab.eventually(lambda: len(seen.changes) >= len(expected))
    assert sorted(seen.changes[-2:], key=str) == sorted(expected[-2:], key=str)
    assert seen.changes[:-2] == expected[:-2]
    revisions = [event.revision for event in seen.events[1:]]  # type: ignore[union-attr]
    assert revisions == sorted(revisions)
    assert revisions[-1] == revisions[-2]


def test_a_watch_keeps_to_its_prefix(lab: Lab) -> None:
    seen = watch(lab, "w/")
    for name in ("w", "w0", "v/z", "w/", "x", "w/a"):
        put(lab, name)
    lab.eventually(lambda: len(seen.changes) >= 2)
    assert seen.changes == [(lab.key("w/"), "v"), (lab.key("w/a"), "v")]


def test_a_watch_tells_of_deletion_by_prefix_and_by_lease(lab: Lab) -> None:
    lease = lab.store.grant(1)
    put(lab, "w/leased", lease=lease)
    put(lab, "w/d/1")
    put(lab, "w/d/2")
    seen = watch(lab, "w/")
    lab.store.commit(Txn((), (DeletePrefix(lab.key("w/d/")),)))
    lab.eventually(lambda: len(seen.changes) >= 3)
    assert seen.changes == [(lab.key(name), None) for name in ("w/d/1", "w/d/2", "w/leased")]


def test_a_closed_watch_is_silent(lab: Lab) -> None:
    closed, open_ = Seen(), Seen()
    subscription = lab.store.watch(lab.key("w/"), closed)
    lab.store.watch(lab.key("w/"), open_)
    lab.eventually(lambda: closed.resyncs and open_.resyncs)
    subscription.close()
    subscription.close()
    put(lab, "w/a")
    lab.eventually(lambda: open_.changes)
    assert closed.changes == []


def test_a_receiver_may_close_its_watch(lab: Lab) -> None:
    seen = Seen()

    def once(event: object) -> None:
        seen(event)  # type: ignore[arg-type]
        if seen.changes:
            subscription.close()

    subscription = lab.store.watch(lab.key("w/"), once)
    lab.eventually(lambda: seen.resyncs)
    put(lab, "w/a", "1")
    lab.eventually(lambda: seen.changes)
    put(lab, "w/a", "2")
    witness = watch(lab, "w/")
    assert witness.fold() == {lab.key("w/a"): "2"}
    assert len(seen.changes) == 1


def test_a_receiver_may_use_the_store(lab: Lab) -> None:
    seen = Seen()

    def answer(event: object) -> None:
        seen(event)  # type: ignore[arg-type]
        if seen.changes and seen.changes[-1] == (lab.key("w/question"), "v"):
            lab.store.put(lab.key("w/answer"), "v")

    lab.store.watch(lab.key("w/"), answer)
    lab.eventually(lambda: seen.resyncs)
    put(lab, "w/question")
    lab.eventually(lambda: len(seen.changes) == 2)
    assert seen.changes[1] == (lab.key("w/answer"), "v")


# --- closing


def test_who_is_cut_off_reaches_nobody_for_so_long_and_then_knows_everything(lab: Lab) -> None:
    seen, lost = Seen(), []
    watch = lab.store.watch(lab.prefix, seen)
    lease = lab.store.grant(60)
    kept = lab.store.keep_alive(lease, 60, lambda: lost.append(lease))
    put(lab, "a", "before", lease)
    lab.eventually(lambda: seen.fold().get(lab.key("a")) == "before")
    began = time.monotonic()
    lab.store.cut_off(3.0)

    def answered() -> bool:
        try:
            return put(lab, "a", "after").value == "after"
        except StoreError:
            return False

    assert not answered() or time.monotonic() - began >= 3.0, "a store may try again for as long as it is cut off"
    lab.eventually(answered)
    lab.eventually(lambda: seen.fold().get(lab.key("a")) == "after")
    assert lost == []
    kept.close()
    watch.close()


def test_a_closed_store_refuses_and_stays_silent(lab: Lab) -> None:
    seen = watch(lab, "w/")
    lab.store.close()
    lab.store.close()
    count = len(seen.events)
    with pytest.raises(StoreError):
        lab.store.get(lab.key("a"))
    with pytest.raises(StoreError):
        lab.store.commit(Txn((), ()))
    assert len(seen.events) == count
