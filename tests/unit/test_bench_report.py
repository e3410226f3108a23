"""The bench's plan, rows and tables; and that README and docs/bench.md say what the rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.compare import __main__ as command
from bench.compare import documents, plan, plots, report, results, trial
from bench.compare.machine import Machine
from bench.compare.plan import Trial

MACHINE = Machine(2, "a CPU", 8, "6.1.0", "3.11.7")


def row(system: str, event: str, rep: int, down: float | None, outcome: str = "recovered", **more: Any) -> dict[str, Any]:
    """As a trial makes it."""
    figures = {"downtime_s": down, "slowdown": 1.0, "redone": 10 if system == "torchrun" else 0, "world_min": 2}
    header = trial.header(Trial(system, True, event, rep=rep, **more), MACHINE)
    losses = {"10": "0x1p0"}
    return {**header, "outcome": outcome, "figures": figures, "losses": losses, "busy_before": 0.02, "versions": {"torch": "2.13.0"}}


ROWS = [
    *(row("torchrun", "kill", rep, down) for rep, down in enumerate((10.0, 12.0, 11.0))),
    *(row("tmrun", "kill", rep, down) for rep, down in enumerate((0.22, 0.11, 0.33))),
    *(row("torchrun", "frozen", rep, None, "no recovery") for rep in range(2)),
    row("tmrun", "frozen", 0, 3.0),
    {**row("torchft", "kill", 0, None), "outcome": "not installed", "why": "no matching distribution"},
    {**row("inprocess", "kill", 0, None), "outcome": "error", "why": "every launcher ended before: training"},
]


def test_a_table_has_medians_ranges_and_ratios() -> None:
    (setting,) = report.settings(ROWS)
    header, lines = report.comparison(ROWS, setting)
    assert header == ["", "kill a worker", "frozen worker", "steps redone"]
    assert lines == [
        ["torchrun (tuned)", "11.0 [10.0–12.0]", "no recovery", "10"],
        ["NVRx in-process, reserve rank (tuned)", "", "", "–"],
        ["torchft, world shrinks (tuned)", "not installed", "", "–"],
        ["tmrun, standby (tuned)", "0.22 [0.11–0.33] (×0.020)", "3.00", "0"],
    ]


def test_a_loser_is_shown() -> None:
    rows = [*ROWS, row("tmrun", "kill", 3, None, "job lost")]
    assert report.cell(report.select(rows, system="tmrun", event="kill")).text == "0.22 [0.11–0.33], 1 of 4 failed"


def test_exactness_is_told_from_losses() -> None:
    rows = [*ROWS, {**row("ft_launcher", "kill", 0, 8.0), "losses": {"10": "0x1.8p0"}}]
    verdicts = report.exactness(rows)
    assert (verdicts["tmrun"], verdicts["ft_launcher"], verdicts["torchft"]) == ("yes", "no", "–")


def test_rows_say_whether_systems_took_turns() -> None:
    def on(system: str, *hours: int) -> list[dict[str, Any]]:
        return [{**row(system, "kill", rep, 1.0), "date": f"2026-11-30T{hour:02}:00:00+00:00"} for rep, hour in enumerate(hours)]

    mixed = [*on("torchrun", 3, 5), *on("torchft", 4, 6)]
    assert "repetitions, systems in turn;" in report.provenance([*mixed, *on("tmrun", 5, 7)])
    apart = report.provenance([*mixed, *on("tmrun-cold", 7, 9), *on("tmrun", 8, 10)])
    assert "in turn, but tmrun, no standby and tmrun, standby after the others, from 2026-11-30 07:00 UTC on" in apart


def test_systems_take_turns() -> None:
    trials = list(plan.SUITES["core"].trials(2))
    assert len(trials) == 2 * len(plan.CORE) * 2 * len(plan.SYSTEMS)
    assert [t.system for t in trials[: len(plan.SYSTEMS)]] == list(plan.SYSTEMS)
    assert len({t.key for t in trials}) == len(trials)
    assert all(t.netns for t in plan.SUITES["network"].trials(1))


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for one in ROWS:
        results.append(path, one)
    with path.open("a") as file:
        file.write('{"key": "cut o')
    results.append(path, row("tmrun", "drain", 0, 0.05))
    rows = results.read(path)
    assert len(rows) == len(ROWS) + 1
    trials = [Trial("torchrun", True, "kill", rep=3), Trial("torchrun", True, "kill", rep=0), Trial("inprocess", True, "kill")]
    assert plan.to_run(trials, rows) == [trials[0], trials[2]]
    assert plan.hopeless(Trial("torchrun", True, "frozen", rep=2), rows)
    assert not plan.hopeless(Trial("tmrun", True, "frozen", rep=1), rows)
    assert plan.to_run([Trial("torchft", True, "kill")], rows), "a peer that was not installed is tried again"


def test_plots_are_svg() -> None:
    picture = ElementTree.fromstring(plots.downtime(ROWS, "downtime"))
    texts = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0.22 s", "no recovery", "not installed"} <= set(texts)


def test_growth_is_a_curve() -> None:
    rows = [row(s, "kill", 0, down, state=state) for s in ("torchrun", "tmrun") for state, down in (("small", 0.3), ("200MB", 0.6))]
    header, lines = report.growth(rows)
    assert header == ["state", "nodes", "event", "torchrun", "tmrun", "ratio"]
    assert [line[:1] + line[3:] for line in lines] == [["small", "0.30", "0.30", "×1.000"], ["200MB", "0.60", "0.60", "×1.000"]]
    picture = ElementTree.fromstring(plots.growth(rows, "growth"))
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 4  # each system: over the state, over the nodes


def test_a_document_is_filled_again_and_again() -> None:
    text = "before\n<!-- generated: compare-core -->\nold\n<!-- /generated -->\nafter"
    new = documents.fill(text, {"core": ROWS})
    assert "0.22 [0.11–0.33] (×0.020)" in new
    assert "a CPU" in new
    assert new.startswith("before\n")
    assert new.endswith("\nafter")
    assert documents.fill(new, {"core": ROWS}) == new


@pytest.mark.parametrize("path", command.DOCUMENTS, ids=lambda p: p.name)
def test_documents_say_what_was_measured(path: Path) -> None:
    text = path.read_text()
    assert "<!-- generated: " in text
    assert documents.fill(text, command.recorded(results.FOLDER)) == text, "run `make bench-documents`"
