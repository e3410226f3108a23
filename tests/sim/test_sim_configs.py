"""Every file in ``configs/simulate`` loads; a mistake in one is one line with file, key and reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tmrun.cli import profiles
from tmrun.core.errors import UsageError

CONFIGS = Path(__file__).parents[2] / "configs" / "simulate"


def test_everything_loads() -> None:
    assert {p.stem for p in (CONFIGS / "failures").iterdir()} == set(profiles.known("failures"))
    models = [profiles.failure_model(name) for name in profiles.known("failures")]
    assert {"meta-rsc1", "meta-rsc2", "llama3", "bytedance"} <= {m.name for m in models}
    assert all(m.name and m.source for m in models)
    assert [c.name for c in map(profiles.cost_model, profiles.known("costs"))] == profiles.known("costs")
    assert len(profiles.strategies().strategy) >= 5
    assert profiles.read_trace(CONFIGS / "example-trace.csv")


def test_the_models_are_the_published_ones() -> None:
    assert profiles.failure_model("llama3").mttf_h(2048) == pytest.approx(54 * 24 / 419, rel=0.002)
    # the 18 named causes sum to 420: the published counts of 419 interruptions are rounded shares
    assert sum(c.weight for c in profiles.failure_model("llama3").causes) == pytest.approx(419, abs=6)
    assert profiles.failure_model("meta-rsc2").per_node_day == 2.34e-3
    shares = {c.name: c.weight for c in profiles.failure_model("bytedance").causes}
    assert (shares["CUDA error"], shares["code or data change"], shares["hang"]) == (36.1, 17.3, 9.9) and sum(shares.values()) == 100
    rsc1 = profiles.failure_model("meta-rsc1")
    assert 4.45 / 60 / rsc1.mttf_h(8192) == pytest.approx(0.1647, abs=0.0005), "the paper's loss at 64K follows from RSC-1's rate"
    paper = profiles.cost_model("paper")
    assert (paper.expected_s, paper.unexpected_s) == (16.6, pytest.approx(21.1))
    assert paper.unexpected_s + paper.standby.warm_s == pytest.approx(50.4)
    assert paper.framework_s(8192) == pytest.approx(4.45 * 60)
    assert (paper.restart.cleanup_s + paper.restart.reschedule_s + paper.framework_s(8192)) / 60 == pytest.approx(6.47, abs=0.01)


GOOD = 'name = "x"\nsource = "x"\nper_node_day = 0.01\n[[causes]]\nname = "c"\nweight = 1\nkind = "exit"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", ": not TOML: "),
        (GOOD.replace("0.01", '"often"'), ": per_node_day: expected a number, got 'often'"),
        (GOOD.replace("0.01", "-1"), ": per_node_day = -1: expected a number >= 0"),
        (GOOD.replace("0.01", "inf"), ": per_node_day = inf"),
        (GOOD.replace("per_node_day = 0.01\n", ""), ": 'per_node_day' is missing: add it"),
        (GOOD.replace('"exit"', '"boom"'), ": kind: 'boom' is none of"),
        (GOOD.replace("weight = 1", "weigth = 1"), ": unknown key causes[0].weigth; did you mean 'weight'?"),
        ("rate = 3\n" + GOOD, ": unknown key rate; "),
        (GOOD.replace("weight = 1", "weight = 0"), ": causes: no weights"),
        (GOOD + "[lemons]\nnodes = 0.1\n", ": lemons: give both nodes and faults, or neither"),
        (GOOD + '[[domains]]\nname = "r"\nnodes = 8\nshare = 1.5\n', ": domains: their shares sum to 1.5"),
        (GOOD + "[planned]\nunplanned_for_each = 0\n", ": planned.unplanned_for_each must be above 0"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        profiles.failure_model(str(path))
    assert str(caught.value).startswith(str(path) + said) and "\n" not in str(caught.value)


def test_no_such_model() -> None:
    with pytest.raises(UsageError, match=r"--failures 'llama4': no such file, and not one of bytedance, llama3"):
        profiles.failure_model("llama4")


def test_costs_from_a_history(tmp_path: Path) -> None:
    rows = [
        {"cause": "initial", "pause_s": None},
        {"cause": "failure", "detect_s": 0.25, "bind_s": 0.3, "comm_s": 0.1, "state_s": 0.2, "pause_s": 0.9},
        {"cause": "failure", "bind_s": 0.5, "comm_s": 0.3, "state_s": 0.4, "pause_s": 1.1},
        {"cause": "drain", "bind_s": 0.0, "comm_s": 0.05, "state_s": 0.6, "pause_s": 0.2},
    ]
    path = tmp_path / "history.json"
    path.write_text(json.dumps({"history": rows}))
    move = profiles.cost_model(str(path)).move
    assert (move.prepare_s, move.bind_s, move.comm_s, move.state_s) == (0.2, 0.4, 0.05, 0.4)
    assert profiles.cost_model(str(path)).detect.exit_s == 0.25
    bench = tmp_path / "core.jsonl"
    bench.write_text("".join(json.dumps({"outcome": "recovered", "phases": row}) + "\n" for row in rows[1:]) + '{"outcome": "job lost"}\n')
    assert profiles.cost_model(str(bench)).move == move
    path.write_text('{"history": [{"cause": "drain", "pause_s": 1, "state_s": "long"}]}')
    with pytest.raises(UsageError, match="state_s 'long': expected seconds, a number >= 0"):
        profiles.cost_model(str(path))
    path.write_text('{"jobs": []}')
    with pytest.raises(UsageError, match="no `history` in it; expected the output of `tmrun history -o json`"):
        profiles.cost_model(str(path))
    path.write_text('{"history": []}')
    with pytest.raises(UsageError, match="no finished migration in it; drain a node"):
        profiles.cost_model(str(path))
