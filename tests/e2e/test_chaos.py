"""Fault after fault on one job: it always trains again, bitwise as if nothing had happened, and nothing piles up in those who stay.

``pytest -m chaos tests/e2e/test_chaos.py`` strikes a hundred times; the default run a few. $CHAOS_SEED and $CHAOS_COUNT choose others,
$CHAOS_FAULTS those of the second test.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from chaos import FAULTS, FLAGS, Chaos
from e2e_lab import DEADLINE_S, GPT, WORLD, Lab, make_lab

from tmrun.worker import shim

SHORT = 5


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_chaos(lab: Lab, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    in_full = "chaos" in (request.config.getoption("-m") or "")
    count, seed = int(os.environ.get("CHAOS_COUNT", "100" if in_full else str(SHORT))), int(os.environ.get("CHAOS_SEED", "7"))
    steps = 60 + 40 * count
    expected = uninterrupted(make_lab(tmp_path_factory.mktemp("plain")), steps)
    chaos = Chaos(lab, random.Random(seed))
    lab.launch(*FLAGS, "--max-restarts", "3", steps=steps, TEST_PACE_S="0.7", **chaos.environment)
    for _ in range(count):
        chaos.strike()
        print(chaos.story[-1], [(round(u.rss_mb), u.threads, u.files) for u in chaos.usages[-1]], flush=True)
    assert lab.finish(deadline_s=DEADLINE_S + 0.2 * steps) == 0
    assert lab.final_hash() == expected
    flat(chaos)


WITHOUT_A_STORE = sorted(set(FAULTS) - {"drain", "store and worker at once"})  # which ask the store for something themselves
AWAY_S = 6.0
"""More than a lease time."""


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_every_fault_while_the_store_is_away(lab: Lab, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing can be decided then; when the store is back, all leases are gone and the fault is a while ago."""
    in_full = "chaos" in (request.config.getoption("-m") or "")
    chosen = os.environ.get("CHAOS_FAULTS", "worker loops for ever,agent SIGKILL").split(",")
    names = WITHOUT_A_STORE if in_full and "CHAOS_FAULTS" not in os.environ else chosen
    steps = 60 + 60 * len(names)
    expected = uninterrupted(make_lab(tmp_path_factory.mktemp("plain")), steps)
    chaos = Chaos(lab, random.Random(1))
    lab.launch(*FLAGS, "--max-restarts", "3", steps=steps, TEST_PACE_S="0.7", **chaos.environment)
    for name in names:
        chaos.strike(name, AWAY_S)
        print(chaos.story[-1], flush=True)
    assert lab.finish(deadline_s=DEADLINE_S + 0.2 * steps) == 0
    assert lab.final_hash() == expected


def uninterrupted(lab: Lab, steps: int) -> str:
    lab.go_fast()
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), str(GPT), "--steps", str(steps)]
    done = subprocess.run(argv, env=lab.environment(), text=True, capture_output=True, timeout=5 * DEADLINE_S, check=True)
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("final parameters sha256")]
    return line.split()[-1]


def flat(chaos: Chaos) -> None:
    """The first faults warm caches up; from then on nothing grows. (The pure-Python switch leaves threads and files, as documented.)"""
    warm, last = chaos.usages[min(2, len(chaos.usages) - 1)], chaos.usages[-1]
    for before, after in zip(warm, last, strict=True):
        assert after.rss_mb < 1.25 * before.rss_mb + 30, (before, after)
        if shim.load() is not None:
            assert after.threads <= before.threads + 4, (before, after)
            assert after.files <= before.files + 8, (before, after)
