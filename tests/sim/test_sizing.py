"""How many standbys: the closed form against the simulated production coordinator, and what people are told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tmrun.cli import profiles
from tmrun.sim import failures, sizing
from tmrun.sim.costs import Standby
from tmrun.sim.ledger import Term
from tmrun.sim.mover import Mover
from tmrun.sim.scene import Options
from tmrun.sim.shape import Shape
from tmrun.sim.trace import Event, Fault

COSTS = profiles.cost_model("paper")
LLAMA = profiles.failure_model("llama3")


def best(nodes: int, model: failures.FailureModel = LLAMA) -> int:
    shape = Shape(nodes)
    return sizing.best(shape, sizing.flows(shape, COSTS, model)).standby


def test_small_jobs_do_best_without() -> None:
    assert best(16) == best(64) == best(128) == 0
    assert sizing.pays_from(Shape(16), COSTS, LLAMA) == 512
    assert best(512) > 0 and best(256) == 0


def test_large_jobs_need_more_than_the_one_or_two_of_the_paper_because_racks_are_lost_whole() -> None:
    assert best(8192) >= 8
    single = replace(LLAMA, domains=())
    assert best(8192, single) in (1, 2, 3)


def test_more_standbys_wait_less_and_cost_what_they_cost() -> None:
    shape = Shape(2048)
    points = list(sizing.points(shape, sizing.flows(shape, COSTS, LLAMA), range(40)))
    assert all(a.waited >= b.waited for a, b in pairwise(points))
    assert [p.held for p in points[:3]] == [0, 1344, 2688]


@pytest.mark.parametrize("standby", [0, 1])
def test_the_closed_form_is_what_the_coordinator_does(standby: int) -> None:
    """Waiting of a rough job, closed form against simulation. Within 30 %: it adds up waits that overlap, and the faults scatter."""
    model = failures.FailureModel(
        "t", "", 0.16, (failures.Cause("gpu", 1, Fault.EXIT),), planned=failures.Planned(4.0, 200.0), back=failures.Back(0, 300.0, 0.0)
    )
    costs = replace(COSTS, standby=Standby(warm_s=1500.0))
    shape = Shape(24, replicas=2, days=80)
    formula = sizing.point(shape, sizing.flows(shape, costs, model), standby)
    trace = failures.draw(model, shape.nodes, shape.nodes + standby, shape.horizon_s, 1)
    simulated = Mover(shape, costs, Options(standby), trace).play()
    waited = simulated.gpu_hours[Term.REFILL] * 168 / 24 / shape.days
    assert waited == pytest.approx(formula.waited, rel=0.3, abs=5.0)


def test_sensitivity_names_what_would_change_the_answer() -> None:
    cases = {c.what: c for c in sizing.sensitivity(Shape(1024), COSTS, LLAMA)}
    assert any(w.startswith("MTTF x 0.5 (3.09 h)") for w in cases)
    assert cases["refill x 24"].best.standby > cases["refill x 0.5"].best.standby
    assert all(c.kept.total >= c.best.total - 1e-6 for c in cases.values())


def test_six_per_cent_explained() -> None:
    wish = sizing.explain("6%", 4, Shape(64), COSTS, LLAMA)
    assert wish.at.standby == 4 and wish.best.standby == 0
    assert wish.share == pytest.approx(4 / 68)
    assert wish.domains == (("rack", 8, False), ("switch", 32, False))
    assert sizing.explain("6%", 62, Shape(1024), COSTS, LLAMA).domains[0][2], "62 nodes cover a rack"


def test_the_papers_own_case_comes_out_of_the_coordinator() -> None:
    """One fault without detection or redo: 21.1 s with a standby, 50.4 s without, 16.6 s for a drain, as in the paper's projection."""
    costs = replace(COSTS, detect=replace(COSTS.detect, exit_s=0.0), checkpoint=replace(COSTS.checkpoint, write_s=0.0))
    shape = Shape(128, days=0.2)

    def paused(kind: Fault, standby: int) -> float:
        o = Mover(shape, costs, Options(standby), (Event(1000.0, (5,), kind, "", 0.0),)).play()
        assert o.gpu_hours[Term.REDO] == 0, "the fault comes at a step boundary"
        return shape.horizon_s * (1 - o.ettr)

    assert paused(Fault.EXIT, 1) == pytest.approx(21.1, abs=0.05)
    assert paused(Fault.EXIT, 0) == pytest.approx(50.4, abs=1.1), "a machine cannot be back before its loss is known: 1 s"
    assert paused(Fault.DRAIN, 1) == pytest.approx(16.6, abs=0.05)
