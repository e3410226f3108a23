"""What an operator is told to look at, when, and what to do about it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_core import KEYS, SPEC, member, running, seat
from test_details import moved, moving, vote
from test_verbs import KEYS as TRAIN
from test_verbs import job, store, tmrun

from tmrun.beacon import Beacon
from tmrun.cli import jobs, without_store
from tmrun.core import conditions
from tmrun.core.codec import encode
from tmrun.core.decision import Timers
from tmrun.core.errors import StoreUnavailable
from tmrun.core.heard import Heard
from tmrun.core.membership import Job
from tmrun.core.model import Done, End, Host, JobState, Lag, Leader, Progress, Run
from tmrun.store.memory import MemoryStore
from tmrun.tui import views

__all__ = ["store", "tmrun"]
LEADER = (KEYS.leader, Leader(Host("a"), seat("a").incarnation, 1))


def found(job: Job, **heard: Any) -> dict[str, str]:
    return {c["code"]: c["text"] for c in conditions.of(job, Heard(**heard))}


def lag(host: str, seconds: float, life: int = 1) -> Lag:
    return Lag(Host(host), seat(host, life).incarnation, seconds)


def test_a_healthy_job_has_none_and_one_that_is_over_neither() -> None:
    assert conditions.of(running(LEADER)) == []
    over = running((KEYS.end, End(JobState.FAILED, 1, "x")), hosts=("a",))
    assert conditions.of(over, Heard(answer_s=9.0, overdue=1)) == []


def test_each_says_how_bad_it_is_and_what_to_do_and_the_worst_comes_first() -> None:
    told = conditions.of(running(hosts=("a", "b")), Heard(answer_s=0.5))
    assert [(c["code"], c["grade"]) for c in told] == [("NO_COORDINATOR", "bad"), ("STANDBY_LOW", "warn"), ("STORE_SLOW", "warn")]
    assert told[1]["text"] == "standbys: 0 of 1" and "start another host" in told[1]["advice"]
    assert told[2]["text"] == "its quickest answer to this command took 0.50 s" and "`tmrun doctor`" in told[2]["advice"]


# -- the store
def test_agents_that_wait_for_the_store_are_named_unless_they_are_gone() -> None:
    current = running(LEADER)
    assert found(current, lags=[lag("a", 0.31), lag("b", 0.62)]) == {"STORE_SLOW": "answers take up to 0.62 s at a, b"}
    assert found(current, lags=[lag("a", 0.0), lag("b", 0.62, life=7), lag("gone", 3.0)]) == {}
    assert found(current, answer_s=conditions.SLOW_S) == {}


def test_an_agent_tells_of_it_seldom() -> None:
    """Only when it becomes slow, becomes much slower or quicker, and is over; not around the limit."""
    told, changes = 0.0, []
    for answer_s in (0.01, 0.19, 0.21, 0.25, 0.3, 0.19, 0.15, 0.21, 0.9, 1.1, 0.3, 0.05, 0.19):
        now = conditions.lag(told, answer_s)
        if now != told:
            changes.append(now)
        told = now
    assert changes == [0.21, 0.9, 0.3, 0.0]


def test_a_job_that_stands_still_is_not_healthy() -> None:
    def at(age_s: float, step_s: float, **more: Any) -> list[str]:
        told = [Progress(Host(h), 7, step_s, 1000.0 - age_s - i, epoch=1) for i, h in enumerate(("a", "b"))]
        return list(found(running(LEADER), progress=told, now=1000.0, **more))

    assert at(59.0, 0.5) == [] and at(61.0, 0.5) == ["NO_PROGRESS"]
    assert at(99.0, 5.0) == [] and at(101.0, 5.0) == ["NO_PROGRESS"]
    ending = running(LEADER, (KEYS.done(1), Done(1, 1)))
    assert found(ending, progress=[Progress(Host("a"), 7, 0.5, 1.0, epoch=1)], now=1000.0) == {}


# -- a migration
def at(job: Job, *seconds: tuple[str, float]) -> int:
    """What is overdue when the coordinator has seen these things for so long."""
    return conditions.overdue(job, Timers({what: 1000.0 - s for what, s in seconds}), 1000.0)


def test_a_migration_that_nobody_decides_is_stuck_and_the_missing_votes_are_named() -> None:
    open_one = moving(vote("s"), LEADER)
    assert at(open_one, ("migration 1", 29.0)) == 0
    assert at(open_one, ("migration 1", 31.0)) == 1
    assert found(open_one, overdue=1) == {"EPOCH_STUCK": "migration 1 to epoch 2 is open for more than 30 s: no vote of stayer a, leaver b"}
    assert found(open_one, overdue=7) == {}, "what was said of another one"
    all_in = moving(vote("s"), vote("a"), vote("b"), LEADER)
    assert "all votes are in, but it is not committed" in found(all_in, overdue=1)["EPOCH_STUCK"]


def test_long_leases_are_waited_for_before_anything_is_stuck() -> None:
    patient = moving(vote("s"), LEADER, (KEYS.spec, replace(SPEC, lease_ttl_s=60)))
    assert at(patient, ("migration 1", 119.0)) == 0
    assert at(patient, ("migration 1", 121.0)) == 1
    assert "for more than 120 s" in found(patient, overdue=1)["EPOCH_STUCK"]


def test_an_epoch_whose_joiner_does_not_take_over_is_stuck() -> None:
    waiting = moved(LEADER, (KEYS.member("s2"), member("s2", warm=True)))
    assert at(waiting, ("taking over 2", 31.0)) == 1 and at(waiting, ("taking over 2", 3.0)) == 0
    text = "epoch 2 was committed more than 30 s ago, and who has not taken over is s (slot 1)"
    assert found(waiting, overdue=1) == {"EPOCH_STUCK": text}
    running_on = moved(LEADER, (KEYS.member("s2"), member("s2", warm=True)), (KEYS.run(1), Run(1, *_seat("s"), 2, (5, 6), True)))
    assert at(running_on, ("taking over 2", 500.0)) == 0 and found(running_on, overdue=1) == {}


def _seat(host: str) -> tuple[Any, Any]:
    return seat(host).host, seat(host).incarnation


def test_nothing_is_stuck_when_nothing_moves() -> None:
    assert at(running(LEADER), ("taking over 1", 500.0)) == 0


# -- what is seen of it
def test_status_and_top_show_them_with_what_to_do(tmrun: Any, store: MemoryStore) -> None:
    store.put(TRAIN.lag("node2"), encode(Lag(Host("node2"), job(store).members[Host("node2")].value.incarnation, 0.7)))
    told = tmrun("status")
    assert "STORE_SLOW: answers take up to 0.70 s at node2; look at its disk" in " ".join(told.out.split())
    (check,) = tmrun("status", "-o", "json").json()["checks"]
    assert (check["code"], check["grade"]) == ("STORE_SLOW", "warn") and "tmrun doctor" in check["advice"]


def test_a_store_that_does_not_answer(tmrun: Any, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this machine knows is told all the same, and the exit code says that the store is lost."""
    store.partitioned = True
    monkeypatch.setattr(jobs, "runtime_folders", lambda _: [])
    told = tmrun("status")
    assert told.code == 6 and "train  unknown (no rank of it has trained on this machine)" in told.out
    assert "STORE_LOST: " in told.out and "`tmrun doctor` looks at each etcd" in " ".join(told.out.split())
    assert "epoch 0" not in told.out, "nothing is known of it"
    value = tmrun("status", "-o", "json").json()
    assert (value["state"], value["nodes"], [c["code"] for c in value["checks"]]) == ("unknown", [], ["STORE_LOST"])

    monkeypatch.setattr(jobs, "runtime_folders", lambda _: [tmp_path])
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    for name, step, age_s in (("node0.0", 71, 2), ("node0.1", 60, 500), ("node1.0", 0, None)):
        page = Beacon.create(tmp_path / f"{name}.beacon")
        page.set("step", step)
        page.set("proven_ns", now - age_s * 10**9 if age_s else 0)
    assert re.search(r"unknown \(the workers of this machine are in step 71; all ranks lived [2-9]\.\d s ago\)", tmrun("status").out)
    assert "STORE_LOST" in views.plain_line(without_store.status("train", StoreUnavailable("no answer")))
