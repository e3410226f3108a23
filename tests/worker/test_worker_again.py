"""Again and again in one job: the process that stays must not grow, nor take longer each time.

``pytest -m chaos`` does a hundred migrations; the default run a dozen, and some of a job whose shards have copies instead of replicas.
Rank 0 stays throughout, rank 1 is drained and killed in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cluster import Cluster
from nursery import Nursery
from test_worker_groups import MODES

from tmrun import wire
from tmrun.worker.groups import ENV_SWITCH
from tmrun.worker.slot import FILES_LEFT, THREADS_LEFT

SCRIPT = Path(__file__).with_name("again.py")
GROUPS = 2
WARM_UP = 3
"""Migrations after which a process has everything it will ever have (its first communicators are never freed)."""
KB = 1 << 10
LEAK_LIMIT = {"shim": 64 * KB, "slot": 512 * KB}
"""Resident memory that a migration may add, over a long run."""
SLACK_S = 0.02
"""Pauses are not told apart by less, on a machine on which nothing else happens."""


@dataclass(frozen=True)
class Sample:
    threads: int
    files: int
    rss: int


def sample(process: psutil.Process) -> Sample:
    """Once the replaced communicators are gone: the lowest of some moments."""
    seen = []
    for _ in range(10):
        seen.append(Sample(process.num_threads(), process.num_fds(), process.memory_info().rss))
        time.sleep(0.02)
    return Sample(min(s.threads for s in seen), min(s.files for s in seen), min(s.rss for s in seen))


CASES = [
    ("ddp", 12),
    ("fsdp2", 8),
    pytest.param("ddp", 100, marks=[pytest.mark.chaos, pytest.mark.timeout(1800)]),
]
"""A layout, and how many migrations."""


@pytest.fixture(params=MODES)
def job(request: pytest.FixtureRequest, tmp_path: Path, nursery: Nursery) -> Iterator[Cluster]:
    environment = {"TEST_STOP": str(tmp_path / "stop"), ENV_SWITCH: request.param, "TMRUN_TEST_RETIRE_S": "0"}
    cluster = Cluster(tmp_path, 2, ["--steps", "1000000"], environment, SCRIPT)
    cluster.nursery = nursery
    yield cluster
    cluster.close()


@pytest.mark.parametrize(("mode", "count"), CASES)
def test_nothing_grows(request: pytest.FixtureRequest, job: Cluster, mode: str, count: int) -> None:
    if count >= 100 and "chaos" not in (request.config.getoption("-m") or ""):
        pytest.skip("a hundred migrations take minutes: pytest -m chaos tests/worker/test_worker_again.py")
    job.environment |= {"TEST_MODE": mode, wire.ENV_SNAPSHOT_EVERY: "2"}
    next_one = job.standby(1)
    job.start()
    stayer = psutil.Process(job.ranks[0].pid)
    samples, resumed = [], []
    for number in range(count):
        joiner, next_one = next_one, job.standby(1)
        job.expect(next_one, wire.Warm)
        settle(job)
        if number % 2:
            job.ranks[1].process.kill()
            job.died(1)
            job.heal({1: joiner})
        else:
            job.drain(1, joiner)
        resumed.append(job.expect(job.ranks[0], wire.Resumed, epoch=job.epoch))
        samples.append(sample(stayer))
    (job.directory / "stop").touch()
    job.finish()
    pauses = [m.pause_s for m in resumed]
    report(samples, pauses)
    check_growth(samples, job.environment[ENV_SWITCH])
    noise_s = noise(job, {m.step for m in resumed})
    for of_a_kind in (pauses[::2], pauses[1::2]):  # drains, kills
        check_pauses(of_a_kind, noise_s)


def settle(job: Cluster) -> None:
    """Some steps in this epoch, so that the next migration is not too early."""
    messages = job.ranks[0].channel.messages
    have = max((m.step for m in messages if isinstance(m, wire.Progress)), default=0)
    job.reach(have + 4)


def noise(job: Cluster, moved_at: set[int]) -> float:
    """By how much a step that nothing happened to is longer than the median one, at worst but for one in twenty."""
    lines = [line.split() for line in (job.losses / "steps0").read_text().splitlines()]
    took = [float(took_s) for step, took_s in lines if moved_at.isdisjoint(range(int(step) - 1, int(step) + 2))]
    print(f"{len(took)} undisturbed steps, median {1e3 * statistics.median(took):.1f} ms")
    return statistics.quantiles(took, n=20)[-1] - statistics.median(took)


def check_pauses(pauses: list[float], noise_s: float) -> None:
    """The last ones against the first ones."""
    some = max(len(pauses) // 4, min(3, len(pauses) // 2))
    early, late = statistics.median(pauses[:some]), statistics.median_low(pauses[-some:])
    print(f"pauses {1e3 * early:.1f} -> {1e3 * late:.1f} ms, noise {1e3 * noise_s:.1f} ms")
    assert late <= 1.5 * early + SLACK_S + 2 * noise_s, (pauses, noise_s)


def report(samples: list[Sample], pauses: list[float]) -> None:
    for number, (s, pause) in enumerate(zip(samples, pauses, strict=True)):
        if number % max(1, len(samples) // 12) == 0 or number == len(samples) - 1:
            print(f"{number:4d} threads {s.threads:4d} files {s.files:4d} rss {s.rss // KB:7d} KiB pause {1e3 * pause:7.1f} ms")


def check_growth(samples: list[Sample], mode: str) -> None:
    first, last, rounds = samples[WARM_UP - 1], samples[-1], len(samples) - WARM_UP
    if mode == "shim":
        assert last.threads - first.threads <= 1, samples
        assert last.files - first.files <= 2, samples
    else:
        assert last.threads - first.threads <= GROUPS * THREADS_LEFT * rounds + 1, samples
        assert last.files - first.files <= GROUPS * (FILES_LEFT + 1) * rounds + 2, samples
    middle, end = samples[len(samples) // 2], samples[-1]
    per_round = (end.rss - middle.rss) / (len(samples) - 1 - len(samples) // 2)
    long = len(samples) >= 100  # a short run still fills the allocator's pools
    assert per_round < (LEAK_LIMIT[mode] if long else 1 << 20), samples
