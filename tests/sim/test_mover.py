"""tmrun on a trace: the production coordinator decides, and the time that passes is what the costs and the protocol say, to the second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tmrun.core.membership import fold
from tmrun.core.model import FENCED_SHARE
from tmrun.sim import failures
from tmrun.sim.costs import Checkpoint, Costs, Detect, Measured, Move, Restart, Snapshot, Standby
from tmrun.sim.ledger import Outcome, Term
from tmrun.sim.mover import Mover
from tmrun.sim.scene import Options
from tmrun.sim.shape import Shape
from tmrun.sim.trace import Event, Fault
from tmrun.sim.world import KEPT_MAPS, JobWorld

TTL = 6
COSTS = Costs(
    "test",
    "test",
    step_s=10.0,
    detect=Detect(exit_s=1.0, hang_s=30.0, slow_s=60.0, lease_ttl_s=TTL),
    move=Move(prepare_s=0.5, bind_s=4.5, comm_s=7.0, state_s=16.6),
    standby=Standby(warm_s=100.0),
    restart=Restart(30.0, 90.0, (Measured(64, 200.0),)),
    checkpoint=Checkpoint(write_s=0.0, every_s=600.0),
    snapshot=Snapshot(every_steps=5, write_s=0.0),
)
SHAPE = Shape(8, days=0.1)
AT = 1003.0
"""Three seconds into step 100."""


def play(*trace: Event, shape: Shape = SHAPE, costs: Costs = COSTS, **options: int | bool) -> Outcome:
    """Without labels, position p holds slot p, and the standbys are the last positions."""
    options = {"placement": False, **options}
    return Mover(shape, costs, Options(**options), trace).play()  # type: ignore[arg-type]


def seconds(o: Outcome, term: Term) -> float:
    return o.gpu_hours[term] * 3600 / o.gpus


def fault(kind: Fault, *hosts: int, at: float = AT, back_s: float = 400.0) -> Event:
    return Event(at, hosts or (3,), kind, "test", back_s)


def test_a_dead_worker_costs_detection_binding_state_and_the_step_that_ran() -> None:
    o = play(fault(Fault.EXIT))
    assert seconds(o, Term.DETECT) == pytest.approx(1.0)
    assert seconds(o, Term.SWITCH) == pytest.approx(4.5 + 16.6, abs=0.01)
    assert seconds(o, Term.REDO) == pytest.approx(3.0)
    assert seconds(o, Term.REFILL) == seconds(o, Term.RESTART) == seconds(o, Term.DECIDE) == 0
    assert o.counts["failure migrations"] == o.counts["moves"] == 1


def test_a_vanished_host_costs_its_lease_and_the_time_in_which_it_must_have_ended_its_workers() -> None:
    o = play(fault(Fault.VANISH), costs=replace(COSTS, move=replace(COSTS.move, bind_s=1.0)))
    assert 0.8 * TTL <= seconds(o, Term.DETECT) <= TTL
    assert seconds(o, Term.SWITCH) == pytest.approx(1.0 + 16.6, abs=0.01)
    waited = seconds(o, Term.DETECT) + seconds(o, Term.DECIDE)
    assert waited + 0.5 == pytest.approx(FENCED_SHARE * TTL, abs=0.6), "since the last vote; most of it has passed when the lease runs out"


def test_the_coordinators_host_may_be_the_one() -> None:
    o = play(fault(Fault.VANISH, 0))
    assert o.counts["failure migrations"] == 1 and seconds(o, Term.DETECT) <= TTL


def test_a_drain_costs_the_switch_and_no_work() -> None:
    o = play(fault(Fault.DRAIN))
    assert seconds(o, Term.SWITCH) == pytest.approx(16.6)
    assert seconds(o, Term.REDO) == seconds(o, Term.DETECT) == 0
    assert o.counts["drain migrations"] == 1


def test_a_drain_without_a_standby_waits_for_the_successor_and_the_job_trains() -> None:
    o = play(fault(Fault.DRAIN), standby=0)
    assert seconds(o, Term.SWITCH) == pytest.approx(16.6) and seconds(o, Term.REFILL) == 0


def test_a_false_alarm_is_booked_as_one() -> None:
    o = play(fault(Fault.ALARM))
    assert seconds(o, Term.ALARM) == pytest.approx(16.6) and seconds(o, Term.SWITCH) == 0


def test_a_straggler_slows_everybody_until_it_is_drained() -> None:
    o = play(fault(Fault.SLOW))
    drained = 60.0 + 4.5  # detection, then the preparation, during which it still trains
    assert seconds(o, Term.DEGRADED) == pytest.approx(drained * 0.2 / 1.2, rel=0.01)
    assert o.counts["drain migrations"] == 1


@pytest.mark.parametrize("kind", [Fault.EXIT, Fault.VANISH])
def test_without_a_standby_everybody_waits_for_the_machine_and_its_warm_up(kind: Fault) -> None:
    o = play(fault(kind, back_s=120.0), standby=0)
    assert seconds(o, Term.REFILL) + seconds(o, Term.DETECT) == pytest.approx(120 + 100, abs=0.1)
    assert o.counts["failure migrations"] == 1


def test_the_cores_patience_ends_the_job_which_is_launched_again() -> None:
    o = play(fault(Fault.VANISH, back_s=2000.0), standby=0)
    assert o.counts["jobs ended"] == 1, "no standby within 600 s"
    assert seconds(o, Term.RESTART) > 320 and seconds(o, Term.REDO) == pytest.approx(AT - 600, abs=1)


def test_the_programs_own_error_restarts_all_from_the_last_checkpoint() -> None:
    o = play(fault(Fault.SOFTWARE))
    assert seconds(o, Term.RESTART) == pytest.approx(200.0)
    assert seconds(o, Term.REDO) == pytest.approx(AT - 600)
    assert o.counts["restarts"] == 1 and o.counts.get("moves", 0) == 0


def test_several_nodes_move_in_one_migration_where_the_pool_covers_them() -> None:
    many = fault(Fault.VANISH, *range(0, 96, 20))
    big = Shape(96, replicas=3, days=0.1)
    covered, short = play(many, shape=big, standby=5), play(many, shape=big, standby=3)
    assert covered.counts["moves"] == 5 and seconds(covered, Term.REFILL) == 0
    assert seconds(short, Term.REFILL) == pytest.approx(400 + 100, abs=TTL + 1)


def test_a_node_and_both_its_witnesses_lost_together_cost_a_restart() -> None:
    """The next node and one half the job away keep a rank's random state, so that the loss of a rack is no restart."""
    big = Shape(96, days=0.1)
    assert play(fault(Fault.VANISH, 10, 11, 12), shape=big, standby=3).counts.get("restarts", 0) == 0
    assert play(fault(Fault.VANISH, 10, 11, 58), shape=big, standby=3).counts["restarts"] == 1


def test_a_rack_that_vanishes_moves_in_one_migration_though_its_leases_run_out_one_by_one() -> None:
    o = play(fault(Fault.VANISH, *range(8)), shape=Shape(96, days=0.1), standby=8)
    assert o.counts.get("restarts", 0) == 0 and o.counts["moves"] == 8


def test_with_placement_no_joiner_is_taken_from_the_rack_that_fails() -> None:
    """Racks of four, whose last hosts are the standbys. All that trains in rack 0 fails, and its standby soon after."""
    shape = Shape(12, rack_nodes=4, days=0.1)
    o = play(fault(Fault.EXIT, 0, 1, 2), fault(Fault.VANISH, 3, at=AT + 9.0), shape=shape, standby=4, placement=True)
    assert o.counts["standbys lost"] == 1 and o.counts["moves"] == 3 and o.counts["failure migrations"] == 1


def test_more_losses_than_one_migration_can_move_restart_everybody() -> None:
    switch = fault(Fault.VANISH, *range(32), back_s=300.0)
    o = play(switch, shape=Shape(96, days=0.1), standby=32)
    assert o.counts["restarts"] == 1 and seconds(o, Term.RESTART) == pytest.approx(200.0)


def test_sharded_state_goes_back_to_the_snapshot_or_without_one_to_the_checkpoint() -> None:
    sharded = replace(SHAPE, replicas=1)
    kept, bare = play(fault(Fault.EXIT), shape=sharded), play(fault(Fault.VANISH), shape=sharded, snapshots=False)
    assert seconds(kept, Term.REDO) == pytest.approx(3.0), "step 100 had a snapshot"
    assert kept.counts["rollbacks"] == 1 and kept.counts.get("restarts", 0) == 0
    assert bare.counts["restarts"] == 1 and seconds(bare, Term.REDO) == pytest.approx(AT - 600, abs=1)
    later = play(fault(Fault.EXIT, at=1043.0), shape=sharded)
    assert seconds(later, Term.REDO) == pytest.approx(43.0)


def test_a_node_and_the_keeper_of_its_copies_lost_together_cost_a_restart() -> None:
    sharded = replace(SHAPE, replicas=1)
    assert play(fault(Fault.VANISH, 3, 4), shape=sharded, standby=2).counts["restarts"] == 1
    assert play(fault(Fault.VANISH, 3, 5), shape=sharded, standby=2).counts.get("restarts", 0) == 0


def test_all_replicas_lost_together_cost_a_restart() -> None:
    assert play(fault(Fault.VANISH, 3, 7), standby=2).counts["restarts"] == 1, "8 nodes, 2 replicas: slot 7 holds the copy of slot 3"
    assert play(fault(Fault.VANISH, 3, 6), standby=2).counts.get("restarts", 0) == 0


@pytest.mark.parametrize("later_s", [0.5, 3.0, 7.0, 20.0])
def test_a_second_failure_in_any_phase_of_the_first(later_s: float) -> None:
    o = play(fault(Fault.EXIT), fault(Fault.VANISH, 5, at=AT + later_s), standby=2)
    assert o.counts["moves"] >= 2 and o.counts.get("restarts", 0) == 0
    assert sum(seconds(o, t) for t in (Term.DETECT, Term.DECIDE, Term.SWITCH)) < 70


@pytest.mark.parametrize("kind", [Fault.EXIT, Fault.VANISH])
def test_the_joiner_dies_before_its_vote_or_after(kind: Fault) -> None:
    for later_s in (2.0, 10.0):
        o = play(fault(Fault.EXIT), fault(kind, 8, at=AT + later_s), standby=2)
        assert o.counts["failure migrations"] >= 1 and o.counts.get("restarts", 0) == 0, (kind, later_s)
        assert seconds(o, Term.USEFUL) > SHAPE.horizon_s - 120


MODEL = failures.FailureModel(
    "rough",
    "made up",
    0.6,
    (
        *(failures.Cause(k.value, 1, k, 0.3) for k in (Fault.EXIT, Fault.VANISH, Fault.HANG, Fault.SLOW)),
        failures.Cause("bug", 0.3, Fault.SOFTWARE),
    ),
    domains=(failures.Domain("rack", 4, 0.1),),
    lemons=failures.Lemons(0.1, 0.5),
    bursts=failures.Bursts(0.3, 60),
    alarms_per_fault=0.2,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("standby", "replicas"), [(0, 2), (1, 1), (3, 2)])
def test_rough_weeks_end_in_training(monkeypatch: pytest.MonkeyPatch, seed: int, standby: int, replicas: int) -> None:
    """Whatever struck: after a quiet day the job trains. And the snapshot that is kept from fold to fold is that of one whole fold."""
    plain = JobWorld.job

    def compared(world: JobWorld) -> object:
        job = plain(world)
        whole = fold(world.keys, world.store.listing(world.keys.ctl).entries)
        assert replace(job, votes={}) == replace(whole, votes={})
        return job

    monkeypatch.setattr(JobWorld, "job", compared)
    shape = Shape(16, replicas=replicas, rack_nodes=4, days=4, seed=seed)
    trace = failures.draw(MODEL, 16, 16 + standby, 3 * failures.DAY_S, seed)
    mover = Mover(shape, COSTS, Options(standby), trace)
    mover.play()
    scene, world = mover.scene, mover.scene.world
    assert scene.progress.stopped is None and not scene.broken, (scene.progress.stopped, scene.broken, world.said)
    assert scene.counts["failure migrations"] + scene.counts["restarts"] > 4
    assert len(world.store.listing(world.keys.ctl).entries) < 4 * 19 + 80 + 2 * KEPT_MAPS, "bounded, however many epochs"


def test_the_same_seed_is_the_same_outcome() -> None:
    trace = failures.draw(MODEL, 16, 18, 3 * failures.DAY_S, 3)
    shape = Shape(16, days=3)
    assert play(*trace, shape=shape, standby=2) == play(*trace, shape=shape, standby=2)


def test_more_standbys_never_wait_longer() -> None:
    shape = Shape(64, days=8)
    trace = failures.draw(replace(MODEL, per_node_day=0.05), 64, 68, shape.horizon_s, 1)
    waits = [seconds(play(*trace, shape=shape, standby=k), Term.REFILL) for k in (0, 1, 2, 4)]
    assert waits[0] > waits[1] >= waits[2] >= waits[3] and waits[0] > 4 * waits[3]
