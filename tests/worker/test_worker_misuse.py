"""Wrong use ends in one error that says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster
from nursery import Nursery

SCRIPT = Path(__file__).with_name("misuse.py")
SAID = {
    "nested": "step 0 begins inside step 0; leave the with block first",
    "outside": "step 0 ran outside `with step:`; put everything that belongs to the step inside that block",
    "optimizer": "a Adam that tmrun.join was not given updates in step 0",
    "sums": "a SGD updates with gradients to which an earlier step has contributed",
    "micro-batches": "put all micro-batches of an update into one `with step:` block",
    "again": "run.steps() in the loop: one loop a script",
}


@pytest.mark.parametrize("how", [*SAID, "nothing"])
def test_misuse(tmp_path: Path, nursery: Nursery, how: str) -> None:
    job = Cluster(tmp_path, 1, ["--steps", "5"], {"TEST_MISUSE": how}, SCRIPT)
    job.nursery = nursery
    try:
        job.start(at_once=True)
        code = job.ranks[0].process.wait(60)
        output = job.output()
        assert "tmrun: not given to tmrun.join, so lost when a rank moves: average (Linear), second (Adam)" in output
        if how in SAID:
            assert code == 1, output
            assert SAID[how] in output
        else:
            assert code == 0, output
    finally:
        job.close()
