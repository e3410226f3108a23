"""Where process groups find each other: c10d's Store operations for workers, kept in etcd under the job's ``kv/``.

So the bootstrap of communicators survives any process and any node, and training processes never talk to etcd.
A wait is fed by one watch per scope (``base/1``, ``m7``), open only while somebody waits. May not know: the protocol, torch.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from tmrun import wire
from tmrun.core.errors import OutcomeUnknown, StoreError
from tmrun.core.keys import Keys
from tmrun.core.txn import Absent, Delete, Guard, ModifiedAt, Put, Txn
from tmrun.store.api import Changed, Store, Watch, WatchEvent

Op = wire.StoreOp


class Rendezvous:
    """Serves worker requests; called from many threads."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._keys = store, keys
        self._lock = threading.Lock()
        self._scopes: dict[str, _Scope] = {}
        self._name = uuid.uuid4().hex[:12]
        self._tickets: list[int] = []
        self._numbers = itertools.count()

    def serve(self, request: wire.StoreRequest) -> wire.StoreReply:
        """Answer one request; store trouble becomes an error text, never an exception."""
        try:
            return self._serve(request)
        except StoreError as error:
            return wire.StoreReply(error=str(error))

    def _serve(self, request: wire.StoreRequest) -> wire.StoreReply:
        keys = [self._keys.kv(k) for k in request.keys]
        match request.op:
            case Op.SET:
                self._store.put(keys[0], request.value)
                return wire.StoreReply(found=True)
            case Op.GET:
                return self._get(keys[0], request.timeout_s)
            case Op.WAIT:
                return self._wait(keys, request.timeout_s)
            case Op.CHECK:
                return wire.StoreReply(found=all(self._store.get(k) is not None for k in keys))
            case Op.ADD:
                return self._add(keys[0], request.amount)
            case Op.COMPARE_SET:
                return self._compare_set(keys[0], request.expected, request.value)
            case Op.DELETE:
                return self._delete(keys[0])

    def _get(self, key: str, timeout_s: float) -> wire.StoreReply:
        found = self._store.get(key)
        if found is None:
            missing = self._wait([key], timeout_s)
            if missing.error:
                return missing
            found = self._store.get(key)
        return wire.StoreReply(_plain(found.value), found=True) if found else wire.StoreReply(error="timeout")

    def _wait(self, keys: list[str], timeout_s: float) -> wire.StoreReply:
        deadline = time.monotonic() + timeout_s
        for name in sorted({self._scope_of(k) for k in keys}):
            scope = self._enter(name)
            try:
                if not scope.wait([k for k in keys if self._scope_of(k) == name], deadline):
                    return wire.StoreReply(error="timeout")
            finally:
                self._leave(name)
        return wire.StoreReply(found=True)

    def _scope_of(self, key: str) -> str:
        """Prefix to watch: the first part of the key, two for ``base/{generation}``."""
        parts = key.removeprefix(self._keys.kv("")).split("/")
        return self._keys.kv("/".join(parts[: 2 if parts[0] == "base" else 1])) + "/"

    def _enter(self, name: str) -> _Scope:
        with self._lock:
            scope = self._scopes.setdefault(name, _Scope())
            scope.users += 1
            if scope.watch is None:
                scope.watch = self._store.watch(name, scope.feed)
            return scope

    def _leave(self, name: str) -> None:
        with self._lock:
            scope = self._scopes[name]
            scope.users -= 1
            if scope.users == 0:
                watch = self._scopes.pop(name).watch
        if scope.users == 0 and watch is not None:
            watch.close()

    def _add(self, key: str, amount: int) -> wire.StoreReply:
        with self._ticket() as ticket:
            while True:
                found = self._store.get(key)
                total = (int(_text(found.value)) if found else 0) + amount
                done = self._write(key, found.mod_revision if found else 0, _b64(str(total)), ticket)
                if done is not None:
                    return wire.StoreReply(number=int(_text(done)), found=True)

    def _compare_set(self, key: str, expected: str, desired: str) -> wire.StoreReply:
        """c10d's rule: an absent key counts as the empty value; the answer is the value afterwards."""
        with self._ticket() as ticket:
            while True:
                found = self._store.get(key)
                if (_plain(found.value) if found else "") != expected:
                    return wire.StoreReply(_plain(found.value) if found else expected, found=found is not None)
                if self._write(key, found.mod_revision if found else 0, desired, ticket) is not None:
                    return wire.StoreReply(desired, found=True)

    def _write(self, key: str, mod_revision: int, value: str, ticket: _Ticket) -> str | None:
        """Compare and swap; what was written, None: try again. One request is carried out once, whatever answers are lost: the same
        transaction leaves a receipt. The key itself would not do, for somebody else may have written it since."""
        guard: Guard = ModifiedAt(key, mod_revision) if mod_revision else Absent(key)
        writes = (Put(key, f"{value}#{ticket.nonce}"), Put(ticket.key, f"{value}#{ticket.nonce}"))
        try:
            if self._store.commit(Txn((guard, *ticket.unchanged), writes, "kv write")).succeeded:
                return value
        except OutcomeUnknown:
            ticket.doubtful = True
        return self._receipt(ticket) if ticket.doubtful else None

    def _receipt(self, ticket: _Ticket) -> str | None:
        """What an attempt whose answer was lost has written. None: nothing yet, and the next attempt excludes that it still will."""
        found = self._store.get(ticket.key)
        if found is not None and found.value.endswith(f"#{ticket.nonce}"):
            return _plain(found.value)
        ticket.unchanged = (Absent(ticket.key) if found is None else ModifiedAt(ticket.key, found.mod_revision),)
        return None

    @contextlib.contextmanager
    def _ticket(self) -> Iterator[_Ticket]:
        """For one request; as many receipts exist as there ever were requests at once."""
        with self._lock:
            number = self._tickets.pop() if self._tickets else next(self._numbers)
        try:
            yield _Ticket(self._keys.kv(f"receipts/{self._name}/{number}"))
        finally:
            with self._lock:
                self._tickets.append(number)

    def _delete(self, key: str) -> wire.StoreReply:
        existed = self._store.get(key) is not None
        self._store.commit(Txn((), (Delete(key),), "kv delete"))
        return wire.StoreReply(found=existed)


@dataclass
class _Ticket:
    """``key`` of the receipt; ``doubtful``: the answer to an attempt was lost; ``unchanged``: the receipt as it was seen since."""

    key: str
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    doubtful: bool = False
    unchanged: tuple[Guard, ...] = ()


class _Scope:
    """The keys under one prefix that exist, as far as its watch has told."""

    def __init__(self) -> None:
        self.users = 0
        self.watch: Watch | None = None
        self._known: set[str] = set()
        self._changed = threading.Condition()

    def feed(self, event: WatchEvent) -> None:
        with self._changed:
            if isinstance(event, Changed):
                (self._known.discard if event.value is None else self._known.add)(event.key)
            else:
                self._known = {kv.key for kv in event.listing.entries}
            self._changed.notify_all()

    def wait(self, keys: list[str], deadline: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._known.issuperset(keys), max(0.0, deadline - time.monotonic()))


def _plain(stored: str) -> str:
    """Without the nonce."""
    return stored.partition("#")[0]


def _text(stored: str) -> str:
    return base64.b64decode(_plain(stored)).decode()


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
