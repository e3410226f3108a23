"""A program that only lost a peer is not to blame while what happened to the peer may still be told."""

from __future__ import annotations

from dataclasses import replace

from test_breaker import KEYS, TTL, Clock, _job, _seat

from tmrun.core import codec, coordinator, ended, living, losses, node, reconcile, restarts
from tmrun.core.decision import DOUBT_SHARE, Timers
from tmrun.core.membership import Job
from tmrun.core.model import Cause, Done, Doubt, Host, Incident, Kind, Notice, Obituary, RankMap, Trouble
from tmrun.core.txn import Put


def job(*troubles: Trouble, gone: tuple[int, ...] = ()) -> Job:
    made = _job(*gone)
    runs = {i: replace(r, value=replace(r.value, joined=False)) for i, r in made.runs.items() if i not in {t.slot for t in troubles}}
    assert made.spec is not None
    spec = replace(made.spec, max_restarts=0)
    return replace(made, spec=spec, troubles={t.slot: t for t in troubles}, runs=runs)


def trouble(slot: int, text: str, code: int = 1, *, echo: bool = False) -> Trouble:
    seat = _seat(slot)
    return Trouble(slot, seat.host, seat.incarnation, 1, slot, code, text, software=code < 128, echo=echo)


ECHO = trouble(0, "exit code 1: RuntimeError: Connection closed by peer", echo=True)
WAIT = DOUBT_SHARE * TTL


def test_an_echo_waits_for_its_cause_and_is_to_blame_without_one() -> None:
    clock = Clock()
    assert "for what happened to its peer" in clock.at(0, job(ECHO))
    assert "for what happened to its peer" in clock.at(WAIT - 1, job(ECHO))
    assert clock.at(WAIT, job(ECHO)) == "end job: failed"


def test_the_programs_own_error_is_told_at_once() -> None:
    clock = Clock()
    clock.at(0, job(ECHO))
    ends = clock.at(1, job(ECHO, trouble(5, "exit code 42: ValueError: mine", 42)))
    assert ends == "end job: failed"
    assert "n5 rank 5" in clock.reason


def test_a_lost_machine_restarts_the_job_at_its_own_expense() -> None:
    clock = Clock()
    clock.at(0, job(ECHO))
    assert clock.at(1, job(ECHO, trouble(5, "killed by SIGKILL", 137))) == "restart map of epoch 2"
    assert clock.reason.startswith("n5 rank 5: killed by SIGKILL")
    silent = Clock()
    assert "presumed dead" in silent.at(0, job(ECHO, gone=(5,)))
    assert silent.at(2 * TTL, job(ECHO, gone=(5,))) == "restart map of epoch 2"


def test_ranks_that_left_the_loop_alone_end_the_job_and_not_those_that_finish_a_moment_later() -> None:
    trains = _job()
    lost = Doubt(Host("n3"), _seat(3).incarnation, 1, "a worker lost a connection in step 11")
    doubts = replace(trains, doubts={Host("n3"): lost})
    gone = replace(doubts, done={7: Done(7, 1)})
    for early in (gone, replace(doubts, doubts={Host("n3"): replace(lost, ended=(7,))})):
        clock = Clock()
        assert "waiting whether these end, too" in clock.at(0, early)
        assert clock.at(WAIT, early) == "end job: failed"
        assert clock.reason.startswith("rank 7 ended well while others train: do all run the same number of steps? (n3: a worker lost")
    late = Clock()
    late.at(0, gone)
    assert late.at(WAIT, replace(gone, done={**gone.done, 3: Done(3, 1)})) != "end job: failed"
    broken = Clock()
    broken.at(0, doubts)
    assert broken.at(WAIT, doubts).startswith("propose failure")


def test_a_node_tells_who_of_its_workers_waits_no_more() -> None:
    whole = job()
    spec = replace(whole.spec, nproc=2) if whole.spec else None
    two = node.Group(node.Purpose.ACTIVE, 0, 1, 1, (7, 8), joined=frozenset({0, 1}), doubt="lost", exits={1: 0})
    made = replace(whole, spec=spec, doubts={Host("n0"): Doubt(Host("n0"), _seat(0).incarnation, 1, "lost")})
    effect = living._doubt(node.Node(_seat(0), 1, two), made, two)
    assert isinstance(effect, node.Submit)
    (put,) = effect.txn.ops
    assert isinstance(put, Put) and codec.decode(Doubt, put.value).ended == (1,)


def test_progress_gives_the_budget_for_lost_machines_back() -> None:
    """And only it does: not a wait for nodes, not a restart that the program causes, not a new coordinator."""
    killed = job(trouble(5, "killed by SIGKILL", 137))

    def after(row: int, *, lasted: bool = False) -> Job:
        assert killed.map is not None
        return replace(killed, map=replace(killed.map, row=row), notice=Notice(1, lasted=lasted))

    def rows(made: Job) -> tuple[str, int | None]:
        """What is done now, and the row that the new map shows."""
        timers = coordinator.observe(Timers(), made, 0.0)
        txn = coordinator.decide(made, timers, 0.0).txn
        assert txn is not None
        maps = [codec.decode(RankMap, op.value) for op in txn.ops if isinstance(op, Put) and op.key == KEYS.map(2)]
        return txn.name, maps[0].row if maps else None

    assert rows(after(0)) == ("restart map of epoch 2", 1)
    assert rows(after(restarts.MACHINE_RESTARTS - 1)) == ("restart map of epoch 2", restarts.MACHINE_RESTARTS)
    assert rows(after(restarts.MACHINE_RESTARTS)) == ("end job: failed", None)
    assert rows(after(restarts.MACHINE_RESTARTS, lasted=True)) == ("restart map of epoch 2", 1)
    own = after(4)
    assert own.spec is not None
    assert rows(replace(own, spec=replace(own.spec, max_restarts=1), troubles={5: trouble(5, "exit code 1: mine")})) == (
        "restart map of epoch 2",
        4,
    )


def test_workers_last_when_they_train_undisturbed() -> None:
    def told(*moments: tuple[float, Job]) -> bool:
        timers = Timers()
        for seconds, made in moments:
            timers = coordinator.observe(timers, made, seconds)
            txn = coordinator.decide(made, timers, seconds).txn
        notices = [codec.decode(Notice, op.value) for op in (txn.ops if txn else ()) if isinstance(op, Put) and op.key == KEYS.notice]
        return any(n.lasted for n in notices)

    trains, lost = _job(), _job(5, standbys=0)
    assert trains.spec is not None
    waits = replace(lost, spec=replace(trains.spec, node_wait_s=1e9))
    assert not told((0, trains), (restarts.LASTED_S - 1, trains))
    assert told((0, trains), (restarts.LASTED_S, trains))
    assert not told((0, waits), (restarts.LASTED_S, waits)), "waiting for a node is no progress"
    assert not told((0, trains), (60, waits), (restarts.LASTED_S, trains)), "a failure begins it anew"
    starts = replace(trains, runs={i: replace(r, value=replace(r.value, joined=False)) for i, r in trains.runs.items()})
    assert not told((0, starts), (restarts.LASTED_S, starts)), "it has not reached its first step"
    assert not told((0, starts), (restarts.LASTED_S, starts), (restarts.LASTED_S + 1, trains))
    assert told((0, starts), (restarts.LASTED_PLAIN_S, starts)), "nobody can tell whether it trains"


def test_a_node_names_the_worker_that_did_not_only_lose_a_peer() -> None:
    whole = job()
    group = node.Group(node.Purpose.ACTIVE, 0, 1, 1, (7,), exits={0: 1}, errors={0: "exit code 1"}, echoes=frozenset({0}))
    me = node.Node(_seat(0), 1, group)
    assert ended._first_failure(me, whole, group).echo
    crashed = replace(group, exits={0: 139}, errors={}, echoes=frozenset())
    assert ended._first_failure(replace(me, group=crashed), whole, crashed).software, "restarted as often as --max-restarts allows"
    assert not ended._first_failure(me, whole, replace(crashed, joined=frozenset({0}))).software, "moved"
    assert not ended._first_failure(me, whole, replace(crashed, exits={0: 137})).software
    both = replace(group, pids=(7, 8), exits={1: 1, 0: 2}, errors={1: "exit code 1", 0: "exit code 2: ValueError"}, echoes=frozenset({1}))
    spec = replace(whole.spec, nproc=2) if whole.spec else None
    first = ended._first_failure(me, replace(whole, spec=spec), both)
    assert (first.rank, first.exit_code, first.echo) == (0, 2, False)
    aborted = ended._first_failure(me, whole, replace(group, exits={0: 134}))
    assert (aborted.cause, aborted.software, aborted.echo) == (Cause.CRASH, True, True), "NCCL's watchdog lost a peer"


def test_a_worker_that_its_own_agent_ended_is_never_the_cause() -> None:
    """Torn down, or stuck in its own end, when the agent ends what a sibling's end left: that sibling alone says why."""
    whole = job()
    made = replace(whole, spec=replace(whole.spec, nproc=2) if whole.spec else None)
    me = node.Node(_seat(0), 1, node.Group(node.Purpose.ACTIVE, 0, 1, 1, (7, 8)), 1)
    me = node.observe(me, node.Exited(7, 1, "exit code 1: Connection closed by peer", echo=True))
    effect = reconcile.reconcile(me, made)
    assert isinstance(effect, node.Kill)
    for code in (143, 137):
        over = node.observe(node.observe(me, node.Killing(effect.reason)), node.Exited(8, code, f"killed by signal {code - 128}"))
        said = reconcile.reconcile(over, made)
        assert isinstance(said, node.Submit)
        (told,) = [codec.decode(Trouble, op.value) for op in said.txn.ops if isinstance(op, Put)]
        assert (told.rank, told.exit_code, told.cause, told.echo) == (0, 1, Cause.PROGRAM, True)


def test_codes_of_ours_are_the_programs_own_where_it_never_took_part() -> None:
    group = node.Group(node.Purpose.ACTIVE, 0, 1, 1, (7,), exits={0: 74})
    me, whole = node.Node(_seat(0), 1, group), job()
    assert ended._first_failure(me, whole, group).cause is Cause.PROGRAM
    for part in (replace(group, joined=frozenset({0})), replace(group, warm=frozenset({0}))):
        assert ended._first_failure(me, whole, part).cause is Cause.DISK


def test_what_a_worker_leaves_reaches_the_blame() -> None:
    """From its end on: the agent judges all of its words, the rules only remember how it was judged."""
    group = node.Group(node.Purpose.ACTIVE, 0, 1, 1, (7, 8))
    for fact in (node.Exited(8, 1, "exit code 1", echo=True), node.Exited(7, 2, "exit code 2")):
        group = node._observe_group(group, fact)
    assert (dict(group.exits), group.echoes) == ({1: 1, 0: 2}, {1})


def test_whose_failure_is_the_newest() -> None:
    killed = trouble(5, "killed by SIGKILL", 137)
    assert losses.blamed(job()) is None
    assert losses.blamed(job(ECHO, killed)) == "n5", "not the first, who only lost a peer"
    made = job(ECHO, killed)
    assert made.map is not None
    restart = replace(made.map, epoch=2, generation=2, kind=Kind.RESTART)
    assert losses.blamed(replace(made, map=restart)) == "n5", "of the map before"
    lost = replace(restart, incidents=(Incident(Host("n9"), -1, Cause.LOST),))
    assert losses.blamed(replace(made, map=lost)) == "n9"
    assert losses.blamed(replace(made, map=lost, troubles={7: replace(trouble(7, "mine"), epoch=2)})) == "n7"


def test_only_the_end_of_a_rank_that_nobody_wished_is_told() -> None:
    rehearses, holds = (node.Group(p, 1, 1, 1, (7,)) for p in (node.Purpose.STANDBY, node.Purpose.ACTIVE))
    assert holds.unwished(7)
    assert not holds.unwished(8)
    assert not replace(holds, killed="fenced").unwished(7)
    assert not rehearses.unwished(7), "it would be told as the failure of the rank that it rehearses"


def test_the_same_death_again_is_charged_to_the_program() -> None:
    """Out of memory after 70 minutes, each time: neither the row of lost machines nor an hour of running forgives that."""

    def again(max_restarts: int, cause: Cause = Cause.MEMORY) -> str:
        dead = replace(trouble(5, "killed by SIGKILL", 137), cause=cause)
        made = job(dead)
        assert made.map is not None and made.spec is not None
        current = replace(made.map, epoch=9, kind=Kind.RESTART, generation=9, incidents=(Incident(Host("n5"), 5, Cause.MEMORY),))
        spec, maps = replace(made.spec, max_restarts=max_restarts), (made.map, current)
        told = replace(made, spec=spec, map=current, maps=maps, troubles={5: replace(dead, epoch=9)}, notice=Notice(9, lasted=True))
        clock = Clock()
        return f"{clock.at(0, told)}: {clock.reason}"

    assert again(0) == "end job: failed: n5 rank 5: killed by SIGKILL, as before an earlier restart: that follows the rank"
    assert again(1).startswith("restart map of epoch 10: n5 rank 5: killed by SIGKILL, as before an earlier restart")
    assert again(0, Cause.KILLED).startswith("restart map of epoch 10: n5 rank 5: killed by SIGKILL; the workers"), "another cause"


def test_a_restart_remembers_which_machine_failed() -> None:
    """Not who only lost a peer; nor does the program's own error accuse a machine."""

    def remembered(made: Job) -> list[tuple[str, int, Cause]]:
        timers = coordinator.observe(Timers(), made, 0.0)
        txn = coordinator.decide(made, timers, 0.0).txn
        assert txn is not None
        (new,) = (codec.decode(RankMap, op.value) for op in txn.ops if isinstance(op, Put) and op.key == KEYS.map(2))
        return [(i.host, i.rank, i.cause) for i in new.incidents]

    killed = replace(trouble(5, "killed by SIGKILL", 137), cause=Cause.KILLED)
    assert remembered(job(ECHO, killed)) == [("n5", 5, Cause.KILLED)]
    lost = replace(job(ECHO, gone=(5,)), obituaries={Host("n5"): Obituary(Host("n5"), _seat(5).incarnation)})
    assert remembered(lost) == [("n5", -1, Cause.LOST)]
    own = job(trouble(5, "exit code 1: mine"))
    assert own.spec is not None
    assert remembered(replace(own, spec=replace(own.spec, max_restarts=1))) == []
