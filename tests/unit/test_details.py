"""The migration that is going on, phase by phase; what a drain would do; a reader that outlives a store that does not answer."""

from __future__ import annotations

import threading
from typing import Any

from test_core import KEYS, running, seat

from tmrun.core import details, foresight, report
from tmrun.core.heard import Heard
from tmrun.core.model import (
    Admin,
    Head,
    Host,
    Kind,
    Member,
    Migration,
    Move,
    Operation,
    Phase,
    Progress,
    RankMap,
    Receiving,
    Resume,
    Timing,
    Trouble,
    Vote,
)
from tmrun.core.plural import some
from tmrun.tui.live import Reader

MOVE = Move(1, seat("b"), seat("s"))


def vote(host: str, stop_step: int | None = None) -> tuple[str, object]:
    return KEYS.vote(host), Vote(Host(host), seat(host).incarnation, migration=1, yes=True, stop_step=stop_step)


def moving(*more: tuple[str, object], kind: Kind = Kind.DRAIN) -> Any:
    return running((KEYS.head, Head(1, 1, 1)), (KEYS.migration(1), Migration(1, 1, 1, kind, (MOVE,), 1, op="d-1", reason="ECC")), *more)


def moved(*more: tuple[str, object]) -> Any:
    seats = (seat("a"), seat("s"))
    done = Migration(1, 1, 1, Kind.DRAIN, (MOVE,), 1, Phase.COMMITTED)
    current = RankMap(2, Kind.DRAIN, seats, 1, 1, (MOVE,), Resume(7))
    return running((KEYS.head, Head(2, 0, 1)), (KEYS.migration(1), done), (KEYS.map(2), current), vote("a", 7), *more)


def states(found: dict[str, Any] | None) -> dict[str, str]:
    assert found is not None
    return {p["name"]: f"{p['state']} {p['done']}/{p['total']}" for p in found["phases"]}


def test_votes_are_counted_and_the_missing_named() -> None:
    assert details.migration(running()) is None
    found = details.migration(moving(vote("s")))
    assert states(found) == {"prepare": "now 1/3", "commit": "next 0/1", "state": "next 0/2", "resume": "next 0/2"}
    assert found is not None and found["phases"][0]["detail"] == "waiting for stayer a, leaver b"
    all_in = details.migration(moving(vote("s", 7), vote("a", 7), vote("b", 7)))
    assert states(all_in)["commit"] == "now 0/1"
    assert all_in is not None and all_in["phases"][1]["detail"] == "stop at step 7"


def test_after_the_commit_it_goes_on_until_everybody_runs() -> None:
    joiners = [Timing(r, "joiner", {"state": 0.1}, bytes=10) for r in (2, 3)]
    stayers = [Timing(r, "stayer", resumed=True) for r in (0, 1)]
    assert states(details.migration(moved()))["state"] == "now 0/2"
    half = details.migration(moved(), joiners)
    assert states(half) == {"prepare": "done 1/1", "commit": "done 1/1", "state": "done 2/2", "resume": "now 0/2"}
    assert half is not None and half["phases"][2]["bytes"] == 20
    assert details.migration(moved(), [*joiners, *stayers]) is None, "it is over"
    assert details.migration(moved(), joiners, step=7) is not None
    assert details.migration(moved(), joiners, step=8) is None, "a lost account does not keep it open"


def test_state_on_its_way_is_told_for_joiners_only() -> None:
    on_its_way = [Receiving(Host("s"), {2: (10, 40), 3: (20, 40)}), Receiving(Host("a"), {0: (1, 2)})]
    status = report.status(moved(), Heard(receiving=on_its_way))
    assert status["migration"]["transfers"] == [{"node": "s", "done": 30, "total": 80}]


def test_many_names_are_counted() -> None:
    assert some([f"n{i}" for i in range(10)]) == "n0, n1, n2, n3, n4, n5, n6, n7 and 2 more"


def test_the_age_of_a_step_needs_both_clocks_and_is_never_negative() -> None:
    told = Progress(Host("a"), 5, 0.1, time=100.0)
    assert details.node(running(), Host("a"), told, 103.0)["step_age_s"] == 3.0
    assert details.node(running(), Host("a"), told, 99.0)["step_age_s"] == 0.0
    assert details.node(running(), Host("a"), told, 0.0)["step_age_s"] is None


# -- foresight
def test_a_drain_is_foreseen_with_what_stands_in_its_way() -> None:
    free = foresight.drain(running(), [Host("b")], ())
    assert (free.moves, free.blockers) == ((MOVE,), ())
    cold = running((KEYS.member("s"), Member(Host("s"), seat("s").incarnation, "x", 1, "1")))
    assert foresight.drain(cold, [Host("b")], ()).blockers == ("0 warm standbys for 1 leaving (s still warming up)",)
    failed = running((KEYS.trouble(0), Trouble(0, Host("a"), seat("a").incarnation, 1, 0, 137, "killed", False)))
    first = foresight.drain(failed, [Host("b")], ())
    assert first.notes == ("what has failed is replaced first: slot 0",) and first.blockers == ("1 warm standby for 1 leaving",)
    assert foresight.drain(failed, [Host("a")], ()).blockers[0].startswith("a has failed")
    draining = running((KEYS.admin("b"), Admin(Host("b"), True, "x", "d-1")), (KEYS.op("d-1"), Operation("d-1", "drain", (Host("b"),))))
    assert "already" in foresight.drain(draining, [Host("b")], ()).blockers[0]
    assert foresight.drain(running(), [Host("s")], ()).notes == ("s holds no ranks: it is free at once",)


# -- reading for a screen
def test_a_reader_goes_on_after_an_error_and_keeps_what_it_had() -> None:
    calls: list[int] = []
    turn = threading.Event()

    def read() -> int:
        calls.append(1)
        turn.set()
        if len(calls) == 2:
            raise OSError("away")
        return len(calls)

    reader: Reader[int] = Reader(read, 60.0)
    try:
        for wanted in (1, 2, 3):
            assert turn.wait(10) and len(calls) == wanted
            turn.clear()
            for _ in range(200):
                if wanted == 2 and reader.error is not None:
                    assert (reader.value, str(reader.error)) == (1, "away")
                    break
                if wanted != 2 and reader.value == wanted:
                    assert reader.error is None
                    break
                threading.Event().wait(0.01)
            else:
                raise AssertionError(f"call {wanted} was not seen")
            reader.wake()
    finally:
        reader.close()
