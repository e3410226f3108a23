"""Keys, planning, node states, report fields, the worker's environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tmrun_agent import rest

from tmrun.core import environment, failures, idle, node, planner, report, transactions
from tmrun.core.codec import decode, encode
from tmrun.core.decision import Timers
from tmrun.core.errors import UsageError
from tmrun.core.heard import Heard
from tmrun.core.keys import Keys, job_of
from tmrun.core.membership import Job, fold, natural
from tmrun.core.model import (
    Admin,
    Head,
    Host,
    Incarnation,
    Kind,
    Leader,
    Machine,
    Member,
    NodeState,
    Notice,
    Obituary,
    RankMap,
    Rehearsal,
    Run,
    Seat,
    Spec,
    Term,
    Timing,
    Trouble,
    WorkerVote,
)
from tmrun.core.node import Purpose
from tmrun.core.reconcile import reconcile
from tmrun.core.states import known_hosts, node_state
from tmrun.core.txn import KeyValue, Put
from tmrun.store.memory import MemoryWorld
from tmrun.tui import timeline

KEYS = Keys("job")
SPEC = Spec(2, 2, 1, ("train.py",))


def seat(host: str, life: int = 1) -> Seat:
    return Seat(Host(host), Incarnation(f"{host}.{life}"))


def member(host: str, life: int = 1, **more: Any) -> Member:
    return Member(Host(host), Incarnation(f"{host}.{life}"), f"addr-{host}", 1, "1", **more)


def snapshot(records: dict[str, object]) -> Job:
    pairs = {KEYS.spec: SPEC, **records}
    return fold(KEYS, [KeyValue(k, encode(v), i + 1, i + 1, 1) for i, (k, v) in enumerate(pairs.items())])


def running(*more: tuple[str, object], hosts: tuple[str, ...] = ("a", "b", "s")) -> Job:
    records: dict[str, object] = {KEYS.member(h): member(h, warm=h.startswith("s")) for h in hosts}
    records |= {KEYS.head: Head(1), KEYS.map(1): RankMap(1, Kind.INITIAL, (seat("a"), seat("b")), 1)}
    records |= {KEYS.run(i): Run(i, Host(h), seat(h).incarnation, 1, (1, 2), True) for i, h in enumerate(("a", "b")) if h in hosts}
    return snapshot(records | dict(more))


# -- keys
def test_keys_parse_to_what_they_were_built_from() -> None:
    assert KEYS.parse(KEYS.vote("node1")) == ("vote", ("node1",))
    assert KEYS.parse(KEYS.run(7)) == ("run", ("000007",))
    assert KEYS.parse(KEYS.head) == ("head", ())
    assert KEYS.parse(KEYS.op("d-1")) == ("op", ("d-1",))
    assert KEYS.parse(KEYS.map(3)) == ("map", ("00000003",))
    assert KEYS.parse(KEYS.timing(3, 1)) == ("timing", ("00000003", "000001"))
    assert KEYS.parse(KEYS.member("a")) == ("member", ("a",))


def test_an_id_of_any_characters_has_keys_of_its_own() -> None:
    assert KEYS.root == "/tmrun/v1/job/"
    odd = Keys("job/ctl 1:=é")
    assert not odd.root.startswith(KEYS.root)
    assert odd.parse(odd.member("a")) == ("member", ("a",))
    assert job_of(odd.index) == odd.job


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_key_order_is_numeric_order(one: int, other: int) -> None:
    assert (KEYS.map(one) < KEYS.map(other)) == (one < other)


def test_hosts_sort_as_people_count() -> None:
    assert sorted(["node10", "node2", "a"], key=natural) == ["a", "node2", "node10"]


# -- planner
@pytest.mark.parametrize(
    ("text", "nodes", "count"), [("0", 8, 0), ("3", 8, 3), ("6%", 100, 6), ("6%", 8, 1), ("0%", 8, 0), ("12.5%", 16, 2)]
)
def test_standby_count(text: str, nodes: int, count: int) -> None:
    assert planner.standby_count(text, nodes) == count


@pytest.mark.parametrize("text", ["", "%", "-1", "-5%", "1.5", "many", "nan%", "inf%", "1e400%"])
def test_a_bad_standby_count_is_the_users_error(text: str) -> None:
    with pytest.raises(UsageError, match="--standby"):
        planner.standby_count(text, 8)


def test_moves_take_warm_free_undrained_hosts() -> None:
    plan = planner.plan_moves(running(), [1])
    assert [(m.slot, m.leaver, m.joiner) for m in plan.moves] == [(1, seat("b"), seat("s"))]
    assert not planner.plan_moves(running((KEYS.admin("s"), Admin(Host("s"), True))), [1]).moves
    assert not planner.plan_moves(running((KEYS.member("s"), member("s"))), [1]).moves
    assert planner.plan_moves(running(), [0, 1]).short == (1,)
    assert not planner.plan_moves(running(), [1], to="b").moves


def test_a_machine_whose_workers_failed_is_the_last_choice() -> None:
    trouble = Trouble(1, Host("b"), seat("b").incarnation, 1, 2, 137, "killed by signal 9", False)
    again = (KEYS.member("b"), member("b", warm=True)), (KEYS.trouble(1), trouble)
    job = running(*again, (KEYS.run(1), Run(0, Host("a"), seat("a").incarnation, 1)), hosts=("a", "b", "s"))
    assert planner.plan_moves(job, [1]).moves[0].joiner == seat("s")


def test_a_joiner_that_rehearsed_the_slot_comes_first_and_one_unlike_the_job_last() -> None:
    live = Machine("cpu", step_s=0.5)
    mine, other = Rehearsal(2, 1.0, 3), Rehearsal(0, 1.0, 3)  # ranks of slots 1 and 0

    def choice(slots: list[int], **machines: Machine) -> list[str]:
        spare = {"s1": other, "s2": mine}
        more = [(KEYS.member(h), member(h, warm=True, rehearsal=r, machine=machines.get(h, live))) for h, r in spare.items()]
        runs = [(KEYS.run(i), Run(i, Host(h), seat(h).incarnation, 1, (1, 2), True, live)) for i, h in enumerate(("a", "b"))]
        job = running(*more, *runs, hosts=("a", "b", "s1", "s2"))
        return [m.joiner.host for m in planner.plan_moves(job, slots).moves]

    assert (choice([1]), choice([0]), choice([0, 1])) == (["s2"], ["s1"], ["s1", "s2"])
    assert choice([1], s2=replace(live, step_s=5.0)) == ["s1"]
    assert choice([1, 0], s2=replace(live, step_s=5.0)) == ["s1", "s2"]


def test_a_host_gets_the_slot_it_asked_for() -> None:
    asked = {KEYS.member(h): member(h, node_rank=rank) for h, rank in (("a", 1), ("b", 0), ("c", 1), ("d", -1))}
    assert planner.first_seats(snapshot(asked)) == (seat("b"), seat("a")), "of two that ask for one slot, the first in natural order has it"
    late = {KEYS.member("a"): member("a"), KEYS.member("b"): member("b", node_rank=7)}
    assert planner.first_seats(snapshot(late)) == (seat("a"), seat("b"))


def test_the_restarted_get_another_port_of_slot_0() -> None:
    ports = KEYS.member("a"), member("a", ports=(7, 8))
    leader = (KEYS.leader, Leader(Host("a"), seat("a").incarnation, 1)), (KEYS.term, Term(1))
    job = replace(running(ports, *leader), machine_restarts=2)
    txn = transactions.start(job, (seat("a"), seat("b")), Kind.RESTART, "because")
    started = next(decode(RankMap, op.value) for op in txn.ops if isinstance(op, Put) and op.key == KEYS.map(2))
    assert (started.master, started.master_port) == ("addr-a", 8)


def test_first_seats_keep_the_living_and_skip_the_drained() -> None:
    assert planner.first_seats(running()) == (seat("a"), seat("b"))
    assert planner.first_seats(running(hosts=("a", "s"))) == (seat("a"), seat("s"))
    drained = (KEYS.admin("a"), Admin(Host("a"), True))
    assert planner.first_seats(running(drained)) == (seat("s"), seat("b"))
    assert planner.first_seats(running(drained, hosts=("a", "b"))) == (seat("b"),)


def test_the_highest_next_step_wins_and_sources_are_replicas_there() -> None:
    votes = [
        WorkerVote(0, 4, 4, (2, 3), witnessed={3: (2, 3), 4: (3,)}),
        WorkerVote(1, 4, 5, (2, 3), witnessed={4: (2,)}),
    ]
    found = planner.resume([2, 3], votes)
    assert found is not None
    assert (found.target, found.sources, found.witness) == (5, {2: 1, 3: 1}, {2: 1, 3: 0}), "a witness counts even if it lost the vote"
    assert planner.resume([2], [WorkerVote(0, 4, 4, witnessed={3: (2,)})]) is None, "no replica"
    assert planner.resume([2], [WorkerVote(0, 4, 4, (2,), witnessed={4: (2,)})]) is None, "nobody knows what it said in step 3"
    nobody = planner.resume([], votes)
    assert nobody is not None
    assert (nobody.target, nobody.sources) == (5, {})


# -- states
@pytest.mark.parametrize(
    ("more", "host", "state"),
    [
        ([], "a", NodeState.ACTIVE),
        ([], "s", NodeState.STANDBY),
        ([(KEYS.member("s"), member("s"))], "s", NodeState.WARMING),
        ([(KEYS.member("s"), member("s", fault="no GPU"))], "s", NodeState.FAILED),
        ([(KEYS.member("a"), member("a", 2))], "a", NodeState.DOWN),
        ([(KEYS.admin("a"), Admin(Host("a"), True, "disk"))], "a", NodeState.DRAINING),
        ([(KEYS.admin("s"), Admin(Host("s"), True))], "s", NodeState.DRAINED),
        ([(KEYS.trouble(1), Trouble(1, Host("b"), seat("b").incarnation, 1, 2, 1, "boom", True))], "b", NodeState.FAILED),
        ([(KEYS.obituary("x"), Obituary(Host("x"), seat("x").incarnation))], "x", NodeState.DOWN),
    ],
)
def test_node_state(more: list[tuple[str, object]], host: str, state: NodeState) -> None:
    assert node_state(running(*more), Host(host))[0] is state


def test_a_node_that_fell_silent_is_suspect_until_somebody_knows() -> None:
    silent = ("a", "s")
    assert node_state(running(hosts=silent), Host("b"))[0] is NodeState.SUSPECT
    note = (KEYS.obituary("b"), Obituary(Host("b"), seat("b").incarnation))
    assert node_state(running(note, hosts=silent), Host("b"))[0] is NodeState.DOWN


def test_who_registers_again_is_not_dead_and_no_later_loss_is_believed_because_of_an_old_word() -> None:
    store, silent = MemoryWorld().client(), ("a", "s")
    for key, value in ((KEYS.obituary("b"), Obituary(Host("b"), seat("b").incarnation)), (KEYS.spec, SPEC)):
        store.put(key, encode(value))
    assert store.commit(transactions.register(Job(KEYS), member("b"), store.grant(10))).succeeded
    left = [(kv.key, decode(Obituary, kv.value)) for kv in store.list(KEYS.node("b")).entries if kv.key == KEYS.obituary("b")]
    assert node_state(running(*left, hosts=silent), Host("b"))[0] is NodeState.SUSPECT


def test_before_the_first_map_everybody_joins() -> None:
    job = snapshot({KEYS.member("a"): member("a")})
    assert [node_state(job, h)[0] for h in known_hosts(job)] == [NodeState.JOINING]


# -- a node
@pytest.mark.parametrize("purpose", Purpose)
def test_workers_that_the_machine_refuses_to_start(purpose: Purpose) -> None:
    """Whoever should hold a slot says so and gives it up; a standby tries again, but not for ever."""
    claimed = (KEYS.run(1), Run(1, Host("b"), seat("b").incarnation, 1))
    told = (KEYS.notice, Notice(1, movable=True))
    me, job = (seat("b"), running(claimed)) if purpose is Purpose.ACTIVE else (seat("x"), running(told, hosts=("a", "b", "x")))
    mine = node.Node(me, 7)
    for _ in range(1 if purpose is Purpose.ACTIVE else idle.MAX_STANDBY_FAILURES):
        effect = reconcile(mine, job)
        assert isinstance(effect, node.Spawn) and effect.purpose is purpose
        mine = node.observe(mine, node.NotSpawned(effect, "its workers cannot be started: no file handles"))
    then = reconcile(mine, job)
    assert isinstance(then, node.Submit)
    (value,) = [op.value for op in then.txn.ops if isinstance(op, Put)]
    if purpose is Purpose.ACTIVE:
        trouble = decode(Trouble, value)
        assert (trouble.text, trouble.software, trouble.rank) == ("its workers cannot be started: no file handles", False, 2)
    else:
        assert decode(Member, value).fault == "its rehearsal failed 3 times: its workers cannot be started: no file handles"


def faulty(host: str) -> tuple[str, Member]:
    return KEYS.member(host), member(host, fault="its rehearsal failed 3 times: ValueError")


def test_a_host_whose_rehearsals_fail_is_no_standby_but_runs_what_starts_anew() -> None:
    leads = (KEYS.leader, Leader(Host("a"), seat("a").incarnation, 1)), (KEYS.term, Term(1)), (KEYS.notice, Notice(1, movable=True))
    lost = running(faulty("s"), *leads, hosts=("a",))
    assert planner.standbys(lost, warm_only=False) == []
    assert [m.host for m in planner.unable(lost)] == ["s"]
    assert planner.first_seats(lost) == (seat("a"), seat("s"))
    assert planner.first_seats(running(faulty("s"), faulty("t"), hosts=("a", "u"))) == (seat("a"), seat("u")), "others come first"
    died = Timers({f"gone 1 {seat('b').incarnation}": -1e3, "short 1": -failures.RETURNS_S - 1})
    decision = failures.replace(lost, lost.spec, lost.map, [1], died, 0.0)  # type: ignore[arg-type]
    assert decision.txn is not None and decision.txn.name == "restart map of epoch 2"
    assert "s cannot take over: its rehearsal failed 3 times" in decision.reason
    assert failures.replace(lost, lost.spec, lost.map, [1], Timers(), 0.0).txn is None, "b may come back"  # type: ignore[arg-type]
    warming = running(faulty("s"), (KEYS.member("t"), member("t")), *leads, hosts=("a",))
    assert failures.replace(warming, lost.spec, lost.map, [1], died, 0.0).txn is None, "t may be warm soon"  # type: ignore[arg-type]


def test_rehearsals_are_tried_again_after_a_rest_and_when_all_start_anew() -> None:
    told = (KEYS.notice, Notice(1, movable=True))
    job, mine = running(told, faulty("x"), hosts=("a", "b", "x")), node.Node(seat("x"), 7)
    for _ in range(idle.MAX_STANDBY_FAILURES):
        mine = node.observe(mine, node.NotSpawned(node.Spawn(Purpose.STANDBY, 1, 0, 1, ""), "no file handles"))
    assert reconcile(mine, job) is None
    anew = (KEYS.head, Head(2)), (KEYS.map(2), RankMap(2, Kind.RESTART, (seat("a"), seat("b")), 2)), (KEYS.notice, Notice(2, movable=True))
    pause = rest.Rest()
    assert pause.tend(mine, 5.0) is pause.tend(mine, 5.0 + rest.AFTER_S - 1) is None
    assert (pause.tend(mine, 5.0 + rest.AFTER_S), pause.tend(mine, 6.0 + rest.AFTER_S)) == (node.Rested(), None)
    for later, now in ((node.observe(mine, node.Rested()), job), (mine, running(faulty("x"), *anew, hosts=("a", "b", "x")))):
        effect = reconcile(later, now)
        assert isinstance(effect, node.Submit)
        assert [decode(Member, op.value).fault for op in effect.txn.ops if isinstance(op, Put)] == [""]
    assert isinstance(reconcile(node.observe(mine, node.Rested()), running(told, hosts=("a", "b", "x"))), node.Spawn)


def test_a_rehearsal_of_several_workers_fails_when_one_of_them_does() -> None:
    """The agent ends the others then; that it ended one on purpose is no failure."""
    told = (KEYS.notice, Notice(1, movable=True))
    job, mine = running(told, hosts=("a", "b", "x")), node.Node(seat("x"), 7)

    def rehearse(before: node.Node, *facts: node.Fact) -> node.Node:
        after = node.observe(before, node.Spawned(node.Group(Purpose.STANDBY, 1, 0, 1, (5, 6))))
        for fact in (*facts, node.Exited(6, 143, "killed by SIGTERM")):
            after = node.observe(after, fact)
        effect = reconcile(after, job)
        assert isinstance(effect, node.Note)
        return node.observe(after, effect.fact)

    killed = node.Killing("this node is drained")
    for _ in range(idle.MAX_STANDBY_FAILURES):
        assert not idle.gave_up(mine)
        mine = rehearse(mine, node.Exited(5, 1, "ValueError: mine"), node.Killing("a worker of this node failed"))
    assert idle.gave_up(mine)
    assert mine.standby_error == "ValueError: mine"
    assert rehearse(node.Node(seat("x"), 7), killed, node.Exited(5, 143)).standby_failures == 0


def test_what_a_warm_standby_says_later_is_told_too() -> None:
    """It rehearsed more, or its GPU is not what it was; a worker of it that has ended makes it none."""
    job, mine = running(hosts=("a", "b", "x")), node.Node(seat("x"), 7)
    mine = node.observe(mine, node.Spawned(node.Group(Purpose.STANDBY, 1, 0, 1, (5, 6))))

    def told(*facts: node.Fact) -> tuple[Member, str] | None:
        nonlocal mine, job
        for fact in facts:
            mine = node.observe(mine, fact)
        effect = reconcile(mine, job)
        if effect is None:
            return None
        assert isinstance(effect, node.Submit)
        (put,) = (o for o in effect.txn.ops if isinstance(o, Put) and o.key == KEYS.member("x"))
        said = decode(Member, put.value)
        job = running((KEYS.member("x"), said), hosts=("a", "b", "x"))
        return said, effect.say

    first, more, machine = Rehearsal(2, 1.0, 3), Rehearsal(2, 1.0, 3, also=(0,)), Machine("cpu", memory_mb=10)
    assert told(node.WorkerWarm(0, machine, first)) is None, "the other is not warm yet"
    both = told(node.WorkerWarm(1, machine, first))
    assert both is not None and (both[0].warm, both[0].rehearsal, both[1]) == (True, first, "x is a warm standby")
    assert told() is None
    again = told(node.WorkerWarm(0, machine, more))
    assert again is not None and (again[0].warm, again[0].rehearsal, again[1]) == (True, more, "")
    worse = told(node.WorkerMeasured(1, replace(machine, memory_mb=1)))
    assert worse is not None and worse[0].machine == replace(machine, memory_mb=1)
    assert told() is None
    ended = told(node.Exited(5, 0))
    assert ended is not None and not ended[0].warm
    assert told() is None


# -- report
def test_status_has_its_stable_fields() -> None:
    status = report.status(running(), Heard())
    assert set(status) >= {
        "api_version", "job", "state", "reason", "epoch", "step", "step_s", "coordinator", "exit_code", "checks", "standby",
        "nodes", "last", "paused", "migration", "requests",
    }  # fmt: skip
    assert set(status["nodes"][0]) >= {"name", "state", "reason", "role", "slot", "ranks", "pids", "step", "labels", "cordoned"}
    assert (status["state"], status["nodes"][1]["ranks"]) == ("running", [2, 3])


def test_phases_split_the_pause_of_the_slowest_stayer() -> None:
    stayer = Timing(0, "stayer", {"wait": 2.0, "switch": 0.5, "detect": 0.1}, redo_s=0.3, pause_s=4.0, resumed=True)
    joiner = Timing(2, "joiner", {"bind": 1.5, "state": 0.7})
    found = report.phases(Kind.FAILURE, [stayer, joiner])
    assert found == {"detect_s": 0.1, "bind_s": 1.5, "comm_s": 1.0, "state_s": 0.7, "redo_s": 0.3, "pause_s": 4.0}
    assert set(report.phases(Kind.DRAIN, [stayer]).values()) == {None}


@pytest.mark.parametrize("told", ["all", "half", "nobody"])
def test_history_names_the_groups_of_all_ranks_that_were_rebuilt_and_kept(told: str) -> None:
    accounts = [
        Timing(0, "stayer", rebuilt=("0",), kept=("2", "1")),
        Timing(1, "stayer", rebuilt=("0", "3"), kept=("1",)),
    ]
    current = running().map
    assert current is not None
    (row,) = report.history([current], {current.epoch: accounts[: {"all": 2, "half": 1, "nobody": 0}[told]]}, 2)
    assert (
        row["groups"]
        == {
            "all": {"rebuilt": ["0", "3"], "kept": ["1", "2"]},
            "half": {"rebuilt": ["0"], "kept": ["1", "2"]},
            "nobody": None,
        }[told]
    )
    assert ("rebuilt" in timeline.line(row)) == (told != "nobody")


# -- environment
def test_a_workers_environment_is_torchruns() -> None:
    env = environment.worker_environment(SPEC, "job", 1, 1, ("10.0.0.1", 4711), 2)
    assert {k: env[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711",
    }  # fmt: skip
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2"
    outer = {"TMRUN_SECRET": "s", "TMRUN_ETCD_PASSWORD": "s", "ETCD_MINE": "kept", "GRPC_VERBOSITY": "NONE"}
    assert environment.inherited(SPEC, 0, outer) == {"ETCD_MINE": "kept", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1"}
    assert environment.inherited(SPEC, 0, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
    assert "OMP_NUM_THREADS" not in environment.inherited(Spec(2, 1, 1, ()), 0, {})
    assert environment.worker_command(("t.py", "--out=${local_rank}", "$HOME", "$$x"), 1) == ["t.py", "--out=1", "$HOME", "$x"]
