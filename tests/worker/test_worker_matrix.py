"""Every parallelism, through every kind of event, bit for bit like the run that nothing happened to."""

from __future__ import annotations

import pytest
from trials import STEP, WORLD, Trials, read_losses

REPLICATED = ("ddp", "ddp_static", "flat", "hsdp", "pp_dp")
SHARDED = ("fsdp2", "tp", "fsdp2_tp", "pp")
VARIANTS = {"accumulation": "TEST_ACCUMULATE=2", "bf16": "TEST_BF16=1"}
CELLS = [
    *((mode, variant, event) for mode in ("ddp", "hsdp") for variant in VARIANTS for event in ("drain", "backward", "after_vote")),
    ("ddp_static", "accumulation", "after_vote"),
    ("ddp_static", "bf16", "drain"),
    ("flat", "accumulation", "drain"),
    ("flat", "bf16", "backward"),
    ("fsdp2", "accumulation", "backward"),
    ("fsdp2", "bf16", "after_vote"),
    ("tp", "accumulation", "drain"),
    ("tp", "bf16", "backward"),
    ("fsdp2_tp", "accumulation", "after_vote"),
    ("fsdp2_tp", "bf16", "drain"),
    ("pp", "accumulation", "backward"),
    ("pp", "bf16", "after_vote"),
    ("pp_dp", "accumulation", "drain"),
    ("pp_dp", "bf16", "backward"),
]
"""Every layout with either variant, and either variant through every event."""


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


@pytest.mark.parametrize(("mode", "variant", "event"), CELLS)
def test_variants(trials: Trials, mode: str, variant: str, event: str) -> None:
    environment = dict([VARIANTS[variant].split("=")])
    if event == "drain":
        trials.drain(mode, WORLD[mode] - 1, **environment)
    elif mode in SHARDED:
        assert trials.kill(mode, 1, event, TMRUN_SNAPSHOT_EVERY="3", **environment) <= STEP
    else:
        assert trials.kill(mode, 1, event, **environment) == STEP + (event == "after_vote")
    (job,) = trials.made
    passes = (4 if mode.startswith("pp") else 1) * (2 if variant == "accumulation" else 1)
    wanted = ",".join(["bfloat16" if variant == "bf16" else "float32"] * passes)
    for rank in range(job.world):
        assert {line.split("/")[2] for line in read_losses(job.losses, rank).values()} == {wanted}, rank


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
