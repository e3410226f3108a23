"""Traces: what is read, what is drawn, and one clear line for every mistake."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tmrun.core.errors import UsageError
from tmrun.sim import failures, trace
from tmrun.sim.trace import Event, Fault

EXAMPLE = Path(__file__).parents[2] / "configs" / "simulate" / "example-trace.csv"
HEAD = "time_s,kind,hosts,cause,back_s\n"


def test_the_example() -> None:
    events = trace.parse(EXAMPLE.read_text(), "example")
    assert {e.kind for e in events} == set(Fault), "it shows every kind"
    rack = next(e for e in events if e.cause == "rack power")
    assert rack == Event(97345.5, tuple(range(32, 40)), Fault.VANISH, "rack power", 900.0)
    assert next(e for e in events if e.cause == "NVLink error").back_s == trace.BACK_S, "an empty cell takes the default"


def test_what_is_written_is_read() -> None:
    events = (Event(1.5, (3, 4, 5, 9), Fault.VANISH, "a, b", 60.0), Event(2.0, (0,), Fault.DRAIN, "", 7.0))
    assert trace.parse(trace.write(events), "x") == events


def test_json_lines() -> None:
    text = '{"time_s": 5, "kind": "exit", "hosts": [3, "7-8"]}\n\n{"time_s": 1, "kind": "hang", "hosts": 2, "cause": "GSP", "back_s": 9}\n'
    assert trace.parse(text, "x") == (Event(1, (2,), Fault.HANG, "GSP", 9), Event(5, (3, 7, 8), Fault.EXIT, "", trace.BACK_S))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "5,exit,3,,\nsoon,exit,3,,\n", "t.csv:3: time_s 'soon': expected seconds, a number >= 0"),
        (HEAD + "-5,exit,3,,\n", "t.csv:2: time_s '-5': expected seconds"),
        (HEAD + "nan,exit,3,,\n", "t.csv:2: time_s 'nan'"),
        (HEAD + "5,explode,3,,\n", "t.csv:2: kind 'explode' is none of exit, vanish, hang, slow, drain, alarm, software"),
        (HEAD + "5,exit,node3,,\n", "t.csv:2: hosts 'node3': expected positions such as 17, 32-39 or 3;9"),
        (HEAD + "5,exit,9-3,,\n", "t.csv:2: hosts '9-3'"),
        (HEAD + "5,exit,0-99999999,,\n", "t.csv:2: hosts '0-99999999'"),
        (HEAD + "5,exit,3,x,late\n", "t.csv:2: back_s 'late'"),
        (HEAD + "5,exit,3,4,5,6\n", "t.csv:2: 6 values for 5 columns; several hosts are joined by ';', not ','"),
        ("time,kind,hosts\n5,exit,3\n", "t.csv:1: no column 'time_s'"),
        ("time_s,kind,hosts,who\n", "t.csv:1: unknown column 'who'"),
        (HEAD, "t.csv: no faults in it"),
        ("", "t.csv: no faults in it"),
        ('{"time_s": 5\n', "t.csv:1: not JSON"),
        ('{"time_s": 5, "kind": "exit", "host": 3}\n', "t.csv:1: unknown field 'host'"),
        ('{"time_s": 5, "kind": "exit", "hosts": []}\n', "t.csv:1: hosts []: nobody is struck"),
        ('{"time_s": true, "kind": "exit", "hosts": 3}\n', "t.csv:1: time_s True"),
    ],
)
def test_mistakes_name_file_line_and_reason(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        trace.parse(text, "t.csv")
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


MODEL = failures.FailureModel(
    "m",
    "made up",
    0.02,
    (failures.Cause("gpu", 3, Fault.EXIT), failures.Cause("bug", 1, Fault.SOFTWARE)),
    domains=(failures.Domain("rack", 8, 0.1),),
    lemons=failures.Lemons(0.02, 0.3),
    bursts=failures.Bursts(0.2, 60),
    alarms_per_fault=0.5,
)
DAYS = 400


def drawn(hosts: int = 512, seed: int = 1) -> tuple[Event, ...]:
    return failures.draw(MODEL, 512, hosts, DAYS * failures.DAY_S, seed)


def test_the_drawn_rates_are_those_of_the_model() -> None:
    events = drawn()
    expected = 512 * 0.02 * DAYS
    kinds = Counter(e.kind for e in events)
    racks = sum(len(e.hosts) > 1 for e in events)
    assert racks == pytest.approx(0.1 * expected, rel=0.15)
    assert kinds[Fault.SOFTWARE] / (kinds[Fault.SOFTWARE] + kinds[Fault.EXIT]) == pytest.approx(0.25, abs=0.03)
    assert kinds[Fault.EXIT] + kinds[Fault.SOFTWARE] == pytest.approx(0.9 * expected * 1.2, rel=0.1), "every fifth is followed by another"
    assert kinds[Fault.DRAIN] == pytest.approx(0.9 * expected / 8.9, rel=0.15)
    assert kinds[Fault.ALARM] == pytest.approx(0.9 * expected * 0.5, rel=0.1)
    by_host = Counter(e.hosts[0] for e in events if e.kind is Fault.EXIT and "burst" not in e.cause)
    worst = sorted(by_host.values(), reverse=True)[:10]
    assert sum(worst) / sum(by_host.values()) == pytest.approx(0.3, abs=0.08), "2 % of the hosts are lemons and have 30 % of the faults"


def test_the_same_seed_is_the_same_trace_and_another_is_not() -> None:
    assert drawn() == drawn() != drawn(seed=2)


def test_more_standbys_do_not_change_what_befalls_the_others() -> None:
    few, many = drawn(512), drawn(520)
    own = [e for e in many if e.hosts[0] < 512 and "burst" not in e.cause]
    assert own == [e for e in few if "burst" not in e.cause]


def test_measured_points_count_below_the_size_from_which_the_rate_holds() -> None:
    points = tuple(failures.MeasuredMttf(g, h) for g, h in ((8, 1144.8), (1024, 7.9), (16384, 1.8)))
    model = failures.FailureModel("m", "", 6.5e-3, MODEL.causes, points)
    assert [round(model.mttf_h(n), 1) for n in (1, 128, 2048)] == [1144.8, 7.9, 1.8]
    assert model.mttf_h(16_384) == pytest.approx(0.23, abs=0.01), "Meta's projection for 131,072 GPUs"
    assert 1.8 < model.mttf_h(512) < 7.9
