"""A job that lacks nodes waits for them as long as it was told to: no longer because coordinators change or hosts come and go, no shorter
because of an earlier wait. The stories are in tests/scenarios."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_core import KEYS, member, running, seat, snapshot

from tmrun.core import codec, coordinator, shortage
from tmrun.core.decision import Decision, Timers
from tmrun.core.membership import Job
from tmrun.core.model import Admin, Head, Host, Kind, Leader, Migration, Notice, Operation, Pause, Phase, Spec, Term, Verb
from tmrun.core.txn import Put, Txn

WAIT = 100.0
LEADS = {KEYS.leader: Leader(Host("a"), seat("a").incarnation, 1), KEYS.term: Term(1), KEYS.spec: Spec(2, 2, 1, ("x",), node_wait_s=WAIT)}


def gathering(*hosts: str, **more: int) -> Job:
    return snapshot({KEYS.member(h): member(h, **more) for h in hosts} | LEADS)


def lost(*hosts: str, notice: Notice | None = None) -> Job:
    """Slot 1 is lost; these are here."""
    job = running(*LEADS.items(), hosts=("a", *hosts))
    return replace(job, notice=notice)


class Coordinator:
    def __init__(self) -> None:
        self.timers = Timers()

    def at(self, now: float, job: Job) -> Decision:
        self.timers = coordinator.observe(self.timers, job, now)
        return coordinator.decide(job, self.timers, now)


def test_the_first_start() -> None:
    me = Coordinator()
    assert me.at(0, gathering("a")).reason == "waiting for nodes: 1 of 2 here"
    me.at(50, gathering("a", "b"))  # it waits for a standby; then b's agent dies
    assert me.at(60, gathering("a")).reason == "waiting for nodes: 1 of 2 here"
    assert me.at(WAIT + 1, gathering("a")).say == "job failed: only 1 of 2 nodes came within 100 s; here: a"


def test_standbys_are_not_waited_for_when_the_time_is_over() -> None:
    me = Coordinator()
    me.at(0, gathering("a"))
    assert "for standbys" in me.at(WAIT - 1, gathering("a", "b")).reason
    decision = me.at(WAIT + 1, gathering("a", "b"))
    assert decision.txn is not None and decision.txn.name == "initial map of epoch 1"


def test_node_ranks_tell_who_is_missing() -> None:
    assert shortage.missing(gathering("a", node_rank=0), (seat("a"),)) == "missing: node rank 1"


@pytest.mark.parametrize(
    ("told", "ends_at"),
    [
        (None, WAIT),
        (Notice(1, True, epoch=1, failed=(1,), short_s=80.0), 20.0),
        (Notice(1, True, short_s=80.0), WAIT),  # of a wait that is over
        (Notice(0, short_s=80.0), WAIT),  # of another generation
    ],
)
def test_another_coordinator_goes_on_where_the_last_one_was(told: Notice | None, ends_at: float) -> None:
    me, job = Coordinator(), lost(notice=told)
    me.at(1000, job)
    before, after = me.at(1000 + ends_at - 1, job), me.at(1000 + ends_at + 1, job)
    assert "failed" not in before.say and after.say.endswith("b is gone (slot 1); no standby within 100 s")


def test_a_host_that_warms_up_is_waited_for_and_a_pause_stops_the_clock() -> None:
    me, cold = Coordinator(), lost("t")  # t registers: no warm standby, but one that will be
    me.at(0, cold)
    assert "no warm standby" in me.at(WAIT + 1, cold).reason
    paused = replace(cold, pause=Pause())
    me.at(WAIT + 2, paused)
    assert "failed" not in me.at(WAIT + 3, lost()).say


def test_fewer_standbys_than_lost_hosts_are_a_shortage_too() -> None:
    both = replace(running(*LEADS.items(), hosts=("s",)), runs=running().runs)
    assert shortage.begun(both, 5.0) == {"short 1": 5.0}


def test_a_restart_for_which_nobody_failed_does_not_wait_for_ever_either() -> None:
    """b is being drained, in vain, when the parked workers cannot go on: it is not to hold ranks again, and nobody else is here."""
    off = Migration(1, 1, 1, Kind.FAILURE, (), 1, Phase.ABORTED, reason="immovable: the state of rank 1 is lost")
    drain = Operation("d1", Verb.DRAIN, (Host("b"),), "maintenance")
    parked = {KEYS.head: Head(1, 0, 1), KEYS.migration(1): off}
    drained = {KEYS.op("d1"): drain, KEYS.admin("b"): Admin(Host("b"), True, "maintenance", "d1")}
    job = running(*LEADS.items(), *parked.items(), *drained.items(), hosts=("a", "b"))
    me = Coordinator()
    me.at(0, running(*LEADS.items(), *drained.items(), hosts=("a", "b")))
    for at in (50.0, 51.0, 50 + WAIT - 1):
        assert me.at(at, job).reason == "waiting for nodes to restart: 1 of 2 here, missing: b"
    told = me.at(50 + WAIT - 1, job).txn
    assert told is not None
    (notice,) = (codec.decode(Notice, op.value) for op in told.ops if isinstance(op, Put))
    last = me.at(50 + WAIT + 1, job)
    assert last.say == f"job failed: {off.reason}; only 1 of 2 nodes to restart on within 100 s; missing: b"
    assert me.at(50 + WAIT + 2, job) == last
    next_one = Coordinator()
    for at in (1000.0, 1006.0):
        decision = next_one.at(at, replace(job, notice=notice))
    assert decision.say == last.say, "it goes on where the first one was"
    standby = replace(running(*LEADS.items(), *parked.items(), *drained.items()), notice=notice)
    assert (Coordinator().at(0, standby).txn or Txn((), ())).name == "restart map of epoch 2"
