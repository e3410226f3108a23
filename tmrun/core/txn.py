"""What a store can be asked to do at once, as plain values.

The control protocol is written in these values so that the same transaction runs on the in-memory model and on etcd.
May not know: which store executes them, what the keys mean, time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_TXN_OPS = 128
"""etcd's default ``--max-txn-ops``: compares, and operations of one branch, are each limited to this."""

NO_LEASE = 0


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as read. Revisions are the store's; ``version`` counts writes since creation."""

    key: str
    value: str
    create_revision: int
    mod_revision: int
    version: int
    lease: int = NO_LEASE


@dataclass(frozen=True, slots=True)
class Absent:
    """Guard: the key does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """Guard: the key is still the incarnation created at this revision (its value may have changed)."""

    key: str
    create_revision: int


@dataclass(frozen=True, slots=True)
class ModifiedAt:
    """Guard: the key has not been written since this revision."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Guard: the key exists and has exactly this value."""

    key: str
    value: str


Guard = Absent | CreatedAt | ModifiedAt | ValueIs


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key, optionally under a lease (a dead lease fails the whole transaction)."""

    key: str
    value: str
    lease: int = NO_LEASE


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key; deleting an absent key is no error."""

    key: str


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    """Delete every key that starts with the prefix."""

    prefix: str


Op = Put | Delete | DeletePrefix


@dataclass(frozen=True, slots=True)
class Txn:
    """All guards hold -> all ops are applied at one revision; otherwise nothing is."""

    guards: tuple[Guard, ...]
    ops: tuple[Op, ...]
    name: str = field(default="txn", compare=False)

    def __post_init__(self) -> None:
        assert len(self.guards) <= MAX_TXN_OPS, (self.name, len(self.guards))
        assert len(self.ops) <= MAX_TXN_OPS, (self.name, len(self.ops))


@dataclass(frozen=True, slots=True)
class TxnResult:
    """``revision`` is the store's after the transaction."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """A range read at one revision."""

    revision: int
    entries: tuple[KeyValue, ...]
