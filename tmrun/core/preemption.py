"""A node that is about to be taken away asks for its own drain, and takes it back when it stays after all.

Level-triggered: what is wanted now against what the store says, so that also a later life of the host, back on its machine, takes back what
an earlier one had asked for. May not know: where the news come from, clocks.
"""

from __future__ import annotations

from tmrun.core import transactions
from tmrun.core.membership import Job
from tmrun.core.model import Operation, OpState, Seat, Verb
from tmrun.core.txn import Txn

PREFIX = "notice-"
"""Of the ids of requests that nodes make for themselves."""


def answer(job: Job, me: Seat, reason: str, force_after_s: float) -> Txn | None:
    """The next thing to write. ``reason`` why this machine goes away, empty: it stays. ``force_after_s``: see ``Operation``."""
    admin = job.admins.get(me.host)
    draining = admin is not None and admin.draining
    if job.end is not None or job.map is None:
        return None
    if reason and not draining:
        number = sum(o.hosts == (me.host,) and o.id.startswith(PREFIX) for o in job.ops.values())
        op_id = f"{PREFIX}{me.host}-{me.incarnation}-{number}"
        return transactions.request(job, Operation(op_id, Verb.DRAIN, (me.host,), f"this machine goes away: {reason}", "", force_after_s))
    if not reason and draining and admin is not None and admin.op.startswith(PREFIX):
        op = job.ops.get(admin.op)
        asked = op if op is not None and op.state is OpState.OPEN else None
        return transactions.withdraw_drain(job, (me.host,), asked, "the machine stays after all")
    return None


def gone(job: Job, me: Seat) -> bool:
    """Nothing of the job depends on this node any more."""
    return job.end is not None or job.map is None or (job.map.slot_of_host(me.host) is None and not job.runs_on(me.host))
