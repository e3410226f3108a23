"""The largest job that is promised: 8,192 nodes of 8 GPUs. ``-m chaos`` simulates a whole week of it and looks at the memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tmrun.cli import profiles
from tmrun.sim.ledger import Outcome, Term
from tmrun.sim.mover import Mover
from tmrun.sim.scene import Options
from tmrun.sim.shape import Shape
from tmrun.sim.trace import Event, Fault

TRACE = (
    Event(600.0, (17,), Fault.EXIT, "GPU", 120.0),
    Event(2000.0, tuple(range(32, 40)), Fault.VANISH, "rack", 300.0),
    Event(4000.0, (70,), Fault.DRAIN, "", 120.0),
)
MAX_MB = 600


def play(nodes: int) -> Outcome:
    return Mover(Shape(nodes, days=0.1), profiles.cost_model("paper"), Options(8, placement=False), TRACE).play()


def test_what_a_fault_costs_does_not_depend_on_the_size() -> None:
    """The same faults of 8,192 nodes and of 96: nothing of the protocol takes longer where it is decided in one place."""
    large, small = play(8192), play(96)
    assert large.counts == small.counts and large.counts["moves"] == 10 and large.counts.get("restarts", 0) == 0
    for term in Term:
        a, b = (o.gpu_hours[term] / o.gpus for o in (large, small))
        assert a == pytest.approx(b) or term is Term.STANDBY, term


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_a_week_in_bounded_memory(request: pytest.FixtureRequest) -> None:
    if "chaos" not in (request.config.getoption("-m") or ""):
        pytest.skip("takes minutes: pytest -m chaos tests/sim/test_largest.py")
    code = (
        "import resource, sys; from tmrun.cli import main; code = main.run(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr); sys.exit(code)"
    )
    args = ("simulate", "--nodes", "8192", "--standby", "8", "--strategies", "tmrun-8", "-o", "json")
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["sizes"][0]["strategies"]
    assert row["counts"]["failure migrations"] > 100 and 0.9 < row["ettr"] < 1
    assert int(done.stderr.split()[-1]) < MAX_MB
