"""Every parallelism, through every kind of event, bit for bit like the run that nothing happened to."""

from __future__ import annotations

import pytest
from trials import STEP, WORLD, Trials

REPLICATED = ("ddp", "ddp_static", "flat", "hsdp", "pp_dp")
SHARDED = ("fsdp2", "tp", "fsdp2_tp", "pp")


@pytest.mark.parametrize("mode", WORLD)
def test_drained(trials: Trials, mode: str) -> None:
    trials.drain(mode, WORLD[mode] - 1)


@pytest.mark.parametrize("point", ["backward", "after_vote"])
@pytest.mark.parametrize("mode", REPLICATED)
def test_killed(trials: Trials, mode: str, point: str) -> None:
    assert trials.kill(mode, 1, point) == STEP + (point == "after_vote")


@pytest.mark.parametrize("point", ["backward", "after_vote"])
@pytest.mark.parametrize("mode", SHARDED)
def test_killed_without_a_replica(trials: Trials, mode: str, point: str) -> None:
    """Everybody goes back to a snapshot."""
    assert trials.kill(mode, 1, point, TMRUN_SNAPSHOT_EVERY="3") <= STEP


@pytest.mark.parametrize("mode", ["ddp", "hsdp"])
@pytest.mark.parametrize("variant", ["TEST_ACCUMULATE=2", "TEST_BF16=1"])
@pytest.mark.parametrize("point", ["backward", "after_vote"])
def test_variants(trials: Trials, mode: str, variant: str, point: str) -> None:
    assert trials.kill(mode, 1, point, **dict([variant.split("=")])) == STEP + (point == "after_vote")


@pytest.mark.parametrize("variant", ["TEST_ACCUMULATE=2", "TEST_BF16=1"])
def test_variants_drained(trials: Trials, variant: str) -> None:
    trials.drain("hsdp", 2, **dict([variant.split("=")]))


@pytest.mark.parametrize("mode", ["ddp_views", "hsdp"])
def test_gradients_that_are_set_to_zero(trials: Trials, mode: str) -> None:
    """In place, after the update: the joiner, and whoever redoes the step, begin with zeros, and not with nothing."""
    assert trials.kill(mode, 1, "backward", TEST_ZERO="after") == STEP


def test_gradients_that_are_set_to_zero_without_a_replica(trials: Trials) -> None:
    assert trials.kill("fsdp2", 1, "backward", TEST_ZERO="before", TMRUN_SNAPSHOT_EVERY="3") <= STEP


def test_eight(trials: Trials) -> None:
    """HSDP 2 x 4."""
    trials.kill("hsdp", 5, "backward", world=8)


def test_a_whole_shard_group_moves(trials: Trials) -> None:
    """Ranks 2 and 3 of HSDP 2 x 2 on one node: nobody who stays is in their group."""
    job = trials.make("hsdp", TMRUN_TEST_KILL=f"2:{STEP}:backward,3:{STEP}:backward")
    joiners = {rank: job.standby(rank) for rank in (2, 3)}
    job.start()
    for rank in joiners:
        job.died(rank)
    assert job.heal(joiners) == STEP
    trials.same(job)
