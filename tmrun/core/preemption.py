"""A node that is about to be taken away asks for its own drain, and takes it back when it stays after all.

    a notice      a drain like an operator's
    SIGTERM       the machine is being shut down: a drain that does not wait where nobody could take the ranks over, and not for long
    ... to all    the job is stopped

Level-triggered: what is wanted now against what the store says, so that also a later life of the host, back on its machine, takes back what
an earlier one had asked for. May not know: where the news come from, clocks.
"""

from __future__ import annotations

from tmrun.core import transactions
from tmrun.core.membership import Job
from tmrun.core.model import End, Host, JobState, Operation, OpState, Seat, Verb
from tmrun.core.txn import Txn

PREFIX = "notice-"
"""Of the ids of requests that nodes make for themselves."""
GOES_AWAY = "this machine goes away"
HANDOVER_S = 20.0
"""From SIGTERM until ranks that could not be handed over are given up; schedulers wait 30 s by default."""
ABANDONED = End(JobState.STOPPED, 143, "SIGTERM to every host of it")


def answer(job: Job, me: Seat, reason: str, force_after_s: float, *, shutdown: bool = False) -> Txn | None:
    """The next thing to write. ``reason`` why this machine goes away, empty: it stays. ``force_after_s``: see ``Operation``. ``shutdown``:
    it does so now."""
    admin = job.admins.get(me.host)
    draining = admin is not None and admin.draining
    if job.end is not None:
        return None
    if reason and not draining:
        number = sum(o.hosts == (me.host,) and o.id.startswith(PREFIX) for o in job.ops.values())
        op_id = f"{PREFIX}{me.host}-{me.incarnation}-{number}"
        life = me.incarnation if shutdown else ""
        op = Operation(op_id, Verb.DRAIN, (me.host,), f"{GOES_AWAY}: {reason}", "", force_after_s, life)
        return transactions.request(job, op)
    found = job.ops.get(admin.op) if admin is not None and draining else None
    asked = found if found is not None and found.state is OpState.OPEN else None
    if reason and shutdown and asked is not None and asked.shutdown != me.incarnation:
        return transactions.hasten(job, asked, me, force_after_s)
    carried_out = job.map is not None and job.map.slot_of_host(me.host) is None
    if asked is not None and carried_out and not reason:
        return None  # the coordinator says so first
    if not reason and draining and admin is not None and admin.op.startswith(PREFIX):
        return transactions.withdraw_drain(job, (me.host,), asked, "the machine stays after all")
    return None


def gone(job: Job, me: Seat) -> bool:
    """Nothing of the job depends on this node any more."""
    slot = job.map.slot_of_host(me.host) if job.map is not None else None
    return job.end is not None or ((slot is None or job.trouble(slot) is not None) and not job.runs_on(me.host))


def given_up(op: Operation) -> str:
    """Why ranks are given up under this request, for people."""
    return op.reason if op.reason.startswith(GOES_AWAY) else f"replaced by an operator ({op.reason})"


def taken_away(job: Job, host: Host) -> str:
    """Why its workers end now, for people; empty: not because anybody wants it."""
    order = job.replacement(host)
    if order is not None:
        return given_up(order)
    return job.admins[host].reason if shut_down(job, host) else ""


def abandoned(job: Job) -> bool:
    """Every host that holds ranks, or could take some, is shut down or has been: nobody is to go on. Needs a snapshot of everything."""
    seats = job.map.seats if job.map is not None else ()
    if seats and len(job.done) == len(seats):
        return False
    hosts = job.members.keys() | {s.host for s in seats}
    return bool(hosts) and all(shut_down(job, host) for host in hosts)


def shut_down(job: Job, host: Host) -> bool:
    """Whether its machine has got SIGTERM, and no newer life of it is here."""
    admin, member = job.admins.get(host), job.members.get(host)
    op = job.ops.get(admin.op) if admin is not None and admin.draining else None
    return op is not None and bool(op.shutdown) and (member is None or member.value.incarnation == op.shutdown)
