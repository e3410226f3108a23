"""Confirm a death in the store, and end the lease of the dead at once.

Only for who can know that the agent *and* its workers are gone: the launcher that saw the agent exit and swept its node, or who was told
so by that launcher's sweeper. May not know: how it is known.
"""

from __future__ import annotations

from tmrun.core import codec
from tmrun.core.keys import Keys
from tmrun.core.model import Host, Incarnation, Member, Obituary
from tmrun.core.txn import Put, Txn
from tmrun.store.api import Store


def bury(store: Store, keys: Keys, host: Host, incarnation: Incarnation) -> None:
    """Raises StoreError; may be repeated."""
    store.commit(Txn((), (Put(keys.obituary(host), codec.encode(Obituary(host, incarnation))),), "obituary"))
    entry = store.get(keys.member(host))
    if entry is not None and entry.lease and codec.decode(Member, entry.value).incarnation == incarnation:
        store.revoke(entry.lease)
