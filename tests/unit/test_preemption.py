"""A machine that is about to go asks for its own drain, once, and takes it back when it stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from test_core import KEYS, member, running, seat, snapshot

from tmrun.core import codec, coordinator, drains, node, preemption, reconcile
from tmrun.core.decision import Decision, Timers
from tmrun.core.membership import Job
from tmrun.core.model import (
    Admin,
    Cause,
    Done,
    End,
    Host,
    JobState,
    Kind,
    Leader,
    Move,
    Operation,
    OpState,
    Pause,
    RankMap,
    Run,
    Term,
    Trouble,
    Verb,
)
from tmrun.core.txn import Put, Txn

ME = seat("a")


def asked(state: OpState = OpState.OPEN, op_id: str = "notice-a-a.1-0") -> list[tuple[str, object]]:
    op = Operation(op_id, Verb.DRAIN, (Host("a"),), "this machine goes away: spot", state=state)
    return [(KEYS.op(op_id), op), (KEYS.admin("a"), Admin(Host("a"), True, op.reason, op_id))]


def test_it_asks_once() -> None:
    txn = preemption.answer(running(), ME, "spot", 20.0)
    assert txn is not None
    (op,) = [codec.decode(Operation, o.value) for o in txn.ops if "/op/" in o.key]  # type: ignore[union-attr]
    assert (op.hosts, op.force_after_s, op.reason) == (("a",), 20.0, "this machine goes away: spot")
    assert preemption.answer(running(*asked()), ME, "spot", 20.0) is None


def test_it_takes_back_what_it_asked_for_and_nothing_else() -> None:
    assert preemption.answer(running(), ME, "", 0.0) is None
    for state in (OpState.OPEN, OpState.DONE):
        txn = preemption.answer(running(*asked(state)), ME, "", 0.0)
        assert txn is not None and txn.name == "undrain"
    assert preemption.answer(running(*asked(op_id="d-123")), ME, "", 0.0) is None, "an operator's drain is the operator's"
    moved = (KEYS.map(1), RankMap(1, Kind.DRAIN, (seat("s"), seat("b")), 1))
    assert preemption.answer(running(*asked(), moved), ME, "", 0.0) is None, "it was carried out: the coordinator says so first"
    assert preemption.answer(running(*asked(OpState.DONE), moved), ME, "", 0.0) is not None


def test_a_second_notice_is_another_request() -> None:
    done = running(asked(OpState.DONE)[0])
    txn = preemption.answer(done, ME, "again", 0.0)
    assert txn is not None
    assert any(o.key == KEYS.op("notice-a-a.1-1") for o in txn.ops)  # type: ignore[union-attr]


def test_when_nothing_depends_on_it() -> None:
    assert not preemption.gone(running(), ME)
    assert preemption.gone(running(), seat("s"))
    over = replace(running(given_up("a")), runs={})
    assert preemption.gone(over, ME), "its workers have ended, and that is said"


def given_up(host: str) -> tuple[str, object]:
    return KEYS.trouble(0), Trouble(0, Host(host), seat(host).incarnation, 1, 0, 137, "it goes away", software=False)


def shut_down(*hosts: str, **more: Any) -> list[tuple[str, object]]:
    """These have got SIGTERM and asked for their drain."""
    found: list[tuple[str, object]] = [(KEYS.leader, Leader(Host("a"), seat("a").incarnation, 1)), (KEYS.term, Term(1))]
    for host in hosts:
        op = Operation(f"notice-{host}", Verb.DRAIN, (Host(host),), f"{preemption.GOES_AWAY}: SIGTERM", "", 20.0, seat(host).incarnation)
        op = replace(op, **more)
        found += [(KEYS.op(op.id), op), (KEYS.admin(host), Admin(Host(host), True, op.reason, op.id))]
    return found


def decide(job: Job, waited_s: float = 0.0) -> Decision:
    return coordinator.decide(job, Timers({f"request {op}": -waited_s for op in job.ops}), 0.0)


def test_sigterm_hastens_a_drain_that_waits() -> None:
    """First the notice, then SIGTERM: the same request."""
    txn = preemption.answer(running(*asked()), ME, "SIGTERM", 20.0, shutdown=True)
    assert txn is not None and txn.name == "hasten notice-a-a.1-0"
    (op,) = [codec.decode(Operation, o.value) for o in txn.ops]  # type: ignore[union-attr]
    assert (op.shutdown, op.force_after_s, op.reason) == ("a.1", 20.0, "this machine goes away: spot")
    assert preemption.answer(running(*shut_down("a")), ME, "SIGTERM", 20.0, shutdown=True) is None


def test_sigterm_during_a_drain_of_several_hosts_is_told_for_this_one() -> None:
    """By the operator's wish still: the machine stays drained when it is back. A script that saved and ended with 0 is not done."""
    both = Operation("d-1", Verb.DRAIN, (Host("a"), Host("b")), "rack 7", force_after_s=100.0)
    admins = [(KEYS.admin(h), Admin(Host(h), True, "rack 7", "d-1")) for h in ("a", "b")]
    txn = preemption.answer(running((KEYS.op("d-1"), both), *admins), ME, "SIGTERM", 20.0, shutdown=True)
    assert txn is not None and txn.name == "hasten d-1 for a"
    written = {o.key: o.value for o in txn.ops if isinstance(o, Put)}
    part, wish = codec.decode(Operation, written.pop(KEYS.op("d-1-a"))), codec.decode(Admin, written.pop(KEYS.admin("a")))
    assert not written, "the others' request is as it was"
    assert (part.hosts, part.shutdown, part.force_after_s, part.reason) == (("a",), "a.1", 100.0, "rack 7")
    told = unjoined((KEYS.op("d-1"), both), (KEYS.op(part.id), part), admins[1], (KEYS.admin("a"), wish))
    assert preemption.answer(told, ME, "SIGTERM", 20.0, shutdown=True) is None
    assert preemption.answer(told, seat("a", 2), "", 0.0) is None
    assert [preemption.shut_down(told, Host(h)) for h in ("a", "b")] == [True, False]
    saved = node.Node(ME, 1, node.Group(node.Purpose.ACTIVE, 0, 1, 1, (1, 2), exits={0: 0, 1: 0}), 1)
    said = reconcile.reconcile(saved, told)
    assert isinstance(said, node.Submit)
    assert [o.key for o in said.txn.ops if isinstance(o, Put)] == [KEYS.trouble(0)]


def unjoined(*more: tuple[str, object]) -> Job:
    job = running(*more)
    return replace(job, runs={i: replace(r, value=replace(r.value, joined=False)) for i, r in job.runs.items()})


def test_ranks_are_handed_over_where_that_is_possible_and_else_given_up_at_once() -> None:
    assert "propose drain" in (decide(running(*shut_down("a"))).txn or Txn((), ())).name
    for job, why in (
        (running(*shut_down("a"), hosts=("a", "b")), "no standby is warm"),
        (unjoined(*shut_down("a")), "a script without run.steps cannot be handed over"),
    ):
        decision = decide(job)
        assert decision.say == f"a: {why}: {drains.FORCED}"
        assert decision.txn is not None
        (op,) = [codec.decode(Operation, o.value) for o in decision.txn.ops]  # type: ignore[union-attr]
        assert (op.verb, op.gently) == (Verb.REPLACE, True)


def test_another_handover_is_not_disturbed() -> None:
    """Two hosts are shut down and one standby was there: the second one's ranks are given up once the first one's have moved."""
    moved = (Move(1, seat("b"), seat("s")),)
    second = running(*shut_down("a", "b"), (KEYS.map(1), RankMap(1, Kind.DRAIN, (seat("a"), seat("s")), 1, moves=moved)))
    assert "no standby" not in decide(second).say, "s has not taken over yet"
    there = replace(second.runs[1], value=Run(1, Host("s"), seat("s").incarnation, 1, (1, 2), True))
    assert decide(replace(second, runs={**second.runs, 1: there})).say.startswith("a: no standby is warm")


def test_a_pause_keeps_an_operators_drain_from_being_forced_but_no_machine_from_going() -> None:
    paused = replace(running(*shut_down("a"), hosts=("a", "b")), pause=Pause())
    assert decide(paused).say.startswith("a: no standby is warm")
    assert not decide(replace(paused, ops={k: replace(op, shutdown="") for k, op in paused.ops.items()}), 21.0).say


def test_a_notice_and_an_operator_wait_for_a_standby_until_their_deadline() -> None:
    waits = running(*shut_down("a", shutdown=""), hosts=("a", "b"))
    assert decide(waits, 19.0).reason == "no warm standby for slot 0"
    assert decide(waits, 21.0).reason == "drain notice-a is overdue"


def test_workers_that_are_given_up_get_the_grace_period_and_are_nobodys_fault() -> None:
    group = node.Group(node.Purpose.ACTIVE, 0, 1, 1, (1, 2), joined=frozenset({0, 1}))
    me = node.Node(ME, 1, group, 1)
    for more, gently in (({"gently": True}, True), ({"reason": "ECC"}, False)):
        job = running(*shut_down("a", verb=Verb.REPLACE, **more))
        effect = reconcile.reconcile(me, job)
        assert isinstance(effect, node.Kill) and effect.gently is gently
        over = replace(me, group=replace(group, killed=effect.reason, exits={0: 0, 1: 0}))
        said = reconcile.reconcile(over, job)
        assert isinstance(said, node.Submit)
        (trouble,) = [codec.decode(Trouble, o.value) for o in said.txn.ops if isinstance(o, Put)]
        assert (trouble.software, trouble.exit_code, trouble.cause) == (False, 137, Cause.LOST)
        assert trouble.text == ("this machine goes away: SIGTERM" if gently else "replaced by an operator (ECC)")


def test_an_end_by_the_agent_itself_is_no_fault_either() -> None:
    """The store did not answer when the machine went away, and does again."""
    killed = f"{preemption.GOES_AWAY}: SIGTERM"
    group = node.Group(node.Purpose.ACTIVE, 0, 1, 1, (1, 2), killed=killed, exits={0: 1, 1: 0})
    said = reconcile.reconcile(node.Node(ME, 1, group, 1), running())
    assert isinstance(said, node.Submit)
    (trouble,) = [codec.decode(Trouble, o.value) for o in said.txn.ops if isinstance(o, Put)]
    assert (trouble.software, trouble.text) == (False, killed)


def test_workers_that_heard_of_it_before_their_agent_did_are_no_fault_either() -> None:
    """A scheduler may send SIGTERM to every process of a host, and a script end with any code then."""
    group = node.Group(node.Purpose.ACTIVE, 0, 1, 1, (1, 2), killed="a worker of this node failed", exits={0: 1, 1: 143})
    for more, cause in (({}, Cause.LOST), ({"shutdown": ""}, Cause.PROGRAM)):
        said = reconcile.reconcile(node.Node(ME, 1, group, 1), running(*shut_down("a", **more)))
        assert isinstance(said, node.Submit)
        (trouble,) = [codec.decode(Trouble, o.value) for o in said.txn.ops if isinstance(o, Put)]
        assert trouble.cause is cause
    over = replace(group, killed="", exits={0: 0, 1: 0})
    for joined, what in ((frozenset[int](), "trouble"), (frozenset({0, 1}), "done")):
        said = reconcile.reconcile(node.Node(ME, 1, replace(over, joined=joined), 1), running(*shut_down("a")))
        assert isinstance(said, node.Submit)
        assert [o.key for o in said.txn.ops if isinstance(o, Put)] == [getattr(KEYS, what)(0)], "a loop that is over is over"


def test_the_job_is_stopped_when_every_host_goes() -> None:
    everybody = running(*shut_down("a", "b", "s"))
    decision = decide(everybody)
    assert decision.txn is not None and decision.say == "job stopped: SIGTERM to every host of it"
    (end,) = [codec.decode(End, o.value) for o in decision.txn.ops]  # type: ignore[union-attr]
    assert (end.state, end.exit_code) == (JobState.STOPPED, 143)
    left = running(*shut_down("a", "b", state=OpState.DONE), hosts=("a",))
    assert preemption.abandoned(left), "who has left before counts"
    back = running(*shut_down("a", "b", "s"), (KEYS.member("s"), member("s", 2)))
    assert not preemption.abandoned(back), "its machine is back, and the request not taken back yet"
    over = replace(everybody, done={0: Done(0, 1), 1: Done(1, 1)})
    for job in (over, running(*shut_down("a", "b")), running(*shut_down("a", "b", "s", shutdown="")), running(), snapshot({})):
        assert not preemption.abandoned(job)


def test_rehearsals_hear_nothing_of_the_end() -> None:
    """SIGTERM would run what the script does when it is stopped."""
    ended = replace(running(), end=End(JobState.STOPPED, 143, "stopped"))
    for purpose, gently in ((node.Purpose.ACTIVE, True), (node.Purpose.STANDBY, False)):
        effect = reconcile.reconcile(node.Node(ME, 1, node.Group(purpose, 0, 1, 1, (1, 2)), 1), ended)
        assert isinstance(effect, node.Kill) and effect.gently is gently
