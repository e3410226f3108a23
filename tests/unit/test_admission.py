"""The policy table of ``core.admission``, row by row, and what follows for the choice of a joiner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tmrun.core.admission import Fit, judge, weakest
from tmrun.core.model import Machine

SOFTWARE = {"torch": "2.13.0", "tmrun": "0.1.0", "python": "3.11.7", "NCCL": "2.28.9", "CUDA": "12.8", "cuDNN": "91002"}
LIVE = Machine("cpu", "", SOFTWARE, memory_mb=8000, peak_mb=3000, step_s=0.5)


def with_software(**other: str) -> Machine:
    return replace(LIVE, software={**LIVE.software, **other})


@pytest.mark.parametrize(
    ("standby", "fit", "why"),
    [
        (LIVE, Fit.FIT, ""),
        (replace(LIVE, step_s=0.9), Fit.FIT, ""),
        (replace(LIVE, step_s=1.2), Fit.LAST, "slow: a rehearsed step took 1.20 s, the job's takes 0.50 s"),
        (replace(LIVE, device="H100"), Fit.LAST, "H100, the job has cpu"),
        (replace(LIVE, software={**LIVE.software, "python": "3.12.1"}), Fit.LAST, "Python 3.12.1, the job has 3.11.7"),
        (replace(LIVE, software={**LIVE.software, "torch": "2.12.0"}), Fit.REFUSED, "torch 2.12.0, the job has 2.13.0"),
        (replace(LIVE, software={**LIVE.software, "tmrun": "0.2.0"}), Fit.REFUSED, "tmrun 0.2.0, the job has 0.1.0"),
        (with_software(NCCL="2.27.3"), Fit.REFUSED, "NCCL 2.27.3, the job has 2.28.9"),
        (with_software(CUDA="13.0"), Fit.LAST, "CUDA 13.0, the job has 12.8"),
        (with_software(cuDNN="91300"), Fit.LAST, "cuDNN 91300, the job has 91002"),
        (replace(LIVE, memory_mb=2000), Fit.REFUSED, "2000 MB for a worker, the job's workers have used 3000 MB"),
        (Machine(), Fit.FIT, ""),
        (None, Fit.FIT, ""),
    ],
)
def test_policy(standby: Machine | None, fit: Fit, why: str) -> None:
    verdict = judge(standby, [LIVE, LIVE, None])
    assert (verdict.fit, verdict.why) == (fit, why)


def test_nothing_known_of_the_job() -> None:
    assert judge(LIVE, [None]).fit is Fit.FIT


def test_a_job_of_several_kinds_accepts_each() -> None:
    assert judge(replace(LIVE, driver="550"), [replace(LIVE, driver="535"), replace(LIVE, driver="550")]).fit is Fit.FIT


def test_a_small_difference_of_short_steps_is_noise() -> None:
    assert judge(replace(LIVE, step_s=0.012), [replace(LIVE, step_s=0.004)]).fit is Fit.FIT


def test_a_node_is_as_good_as_its_weakest_worker() -> None:
    node = weakest([LIVE, replace(LIVE, memory_mb=7000, peak_mb=4000, step_s=0.6)])
    assert (node.memory_mb, node.peak_mb, node.step_s) == (7000, 4000, 0.6)


def test_a_nodes_accelerators_are_those_of_all_its_workers() -> None:
    seen = [replace(LIVE, gpus=8, gpus_used=(f"GPU-{i}",)) for i in (3, 1)]
    assert (weakest(seen).gpus, weakest(seen).gpus_used) == (8, ("GPU-1", "GPU-3"))
    masked = [replace(LIVE, gpus=1, gpus_used=(f"GPU-{i}",)) for i in range(4)]
    assert weakest(masked).gpus == 4, "each sees one, and not the same"
    assert weakest([replace(LIVE, gpus=1)]).gpus == 1
