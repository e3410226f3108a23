"""Between the plain values of ``core.txn`` and etcd's messages.

May not know: channels, retries, time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmrun.core.txn import Absent, CreatedAt, Delete, DeletePrefix, Guard, KeyValue, Listing, ModifiedAt, Op, Put, Txn, ValueIs
from tmrun.store.etcd_stubs import rpc


def raw(value: str) -> bytes:
    """To the wire. Foreign bytes that ``text`` read survive the round trip."""
    return value.encode("utf-8", "surrogateescape")


def text(value: bytes) -> str:
    """From the wire."""
    return value.decode("utf-8", "surrogateescape")


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Key and range_end for all keys with the prefix; etcd reads an end of one zero byte as "to the last key"."""
    start = raw(prefix)
    stem = start.rstrip(b"\xff")
    if not stem:
        return start or b"\0", b"\0"
    return start, stem[:-1] + bytes([stem[-1] + 1])


def key_value(kv: Any) -> KeyValue:
    """One key as etcd sent it."""
    return KeyValue(text(kv.key), text(kv.value), kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def listing(reply: Any) -> Listing:
    """A range reply."""
    return Listing(reply.header.revision, tuple(key_value(kv) for kv in reply.kvs))


def range_request(prefix: str) -> Any:
    """Linearizable: etcd's default, and never changed here."""
    key, range_end = prefix_range(prefix)
    return rpc.RangeRequest(key=key, range_end=range_end)


def ranges_request(prefixes: Sequence[str]) -> Any:
    """Several ranges, read at one revision."""
    return rpc.TxnRequest(success=[rpc.RequestOp(request_range=range_request(prefix)) for prefix in prefixes])


def listings(reply: Any) -> Listing:
    """The reply to ``ranges_request``."""
    return Listing(reply.header.revision, tuple(key_value(kv) for each in reply.responses for kv in each.response_range.kvs))


def _compare(guard: Guard) -> Any:
    equal = rpc.Compare.EQUAL
    key = raw(guard.key)
    if isinstance(guard, Absent):
        return rpc.Compare(result=equal, target=rpc.Compare.VERSION, key=key, version=0)
    if isinstance(guard, CreatedAt):
        return rpc.Compare(result=equal, target=rpc.Compare.CREATE, key=key, create_revision=guard.create_revision)
    if isinstance(guard, ModifiedAt):
        return rpc.Compare(result=equal, target=rpc.Compare.MOD, key=key, mod_revision=guard.mod_revision)
    assert isinstance(guard, ValueIs), guard
    return rpc.Compare(result=equal, target=rpc.Compare.VALUE, key=key, value=raw(guard.value))


def _request_op(op: Op) -> Any:
    if isinstance(op, Put):
        return rpc.RequestOp(request_put=rpc.PutRequest(key=raw(op.key), value=raw(op.value), lease=op.lease))
    if isinstance(op, Delete):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=raw(op.key)))
    assert isinstance(op, DeletePrefix), op
    key, range_end = prefix_range(op.prefix)
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=range_end))


def txn_request(txn: Txn) -> Any:
    """No else-branch: a failed guard applies nothing."""
    return rpc.TxnRequest(compare=[_compare(guard) for guard in txn.guards], success=[_request_op(op) for op in txn.ops])
