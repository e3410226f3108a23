"""The guards are the protocol: drop one, and an invariant breaks (its number is the last column).

Three ways to show it: a request that is held back while others go on (``late``), a stray one that arrives although its sender has gone on
(``stale``), random walks. A guard that another one implies is not there.
"""

from __future__ import annotations

import pytest
from late import play
from mutations import MUTATIONS
from stale import CASES, deliver
from walker import drains, walk

LATE = [
    ("start: leader", "drain", "only_an_election", "initial", "8"),
    ("start: leader and head", "drain", "only_an_election", "initial", "8"),
    ("propose: leader", "crash", "my_next_life", "propose", "8"),
    ("propose: leader and head", "crash", "only_an_election", "propose", "8"),
    ("propose: members unchanged", "drain", "only_new_lives", "propose", "5"),
    ("propose: joiner not drained", "drain", "standbys_are_drained", "propose", "3"),
    ("propose: joiner not drained", "drain", "standbys_are_cordoned", "propose", "3"),
    ("propose: not paused since", "crash", "the_job_is_paused", "propose", "17"),
    ("start: not paused since", "early_crash", "the_job_is_paused", "restart", "17"),
    ("commit: leader", "crash", "only_an_election", "commit", "8"),
    ("commit: leader and head", "crash", "only_an_election", "commit", "8"),
    ("commit: members unchanged", "drain", "only_new_lives", "commit", "5"),
    ("abort: leader", "cancelled_drain", "only_an_election", "abort", "8"),
    ("abort: leader and head", "cancelled_drain", "only_an_election", "abort", "8"),
    ("vote: I am a member", "drain", "only_an_election", "vote", "9"),
    ("vote: member and migration", "drain", "only_an_election", "vote", "9"),
    ("finish_op: leader", "drain", "only_an_election", "finish", "8"),
]
"""Mutation, and the late transaction that shows it."""

DRAINS = {"node: a commit before a newer prepare": "5"}
GIVEN_UP = {"node: gives up what it claimed in vain": "the story did not get there"}
HEALED = {"node: a start map wants new processes": "15"}

STALE = [
    ("elect: term as read", "elected_twice", "8"),
    ("elect: term as read", "elected_over_a_leader", "8"),
    ("elect: I am a member", "elected_without_being_a_member", "8"),
    ("start: head unchanged", "started_after_another_map", "4"),
    ("propose: head unchanged", "proposed_twice", "4"),
    ("propose, commit: failed slot's member key", "proposed_for_a_slot_that_is_claimed_again", "1"),
    ("propose, commit: failed slot's member key", "committed_after_the_slot_was_claimed_again", "1"),
    ("coordinator: a leaver owes word", "lease_dropped_during_the_handover", "11"),
    ("propose, commit: failed slot's member key", "committed_when_the_holder_is_back", "1"),
    ("start: who loses a seat has not come back", "restarted_when_a_holder_is_back", "1"),
    ("propose, commit: drained slot's member key", "committed_after_its_leaver_died", "9"),
    ("commit: head unchanged", "committed_after_its_abort", "4"),
    ("abort: head unchanged", "aborted_after_its_commit", "4"),
    ("claim: nobody runs the slot", "claimed_while_it_runs", "1"),
    ("claim: I have not given it up", "claimed_after_it_was_given_up", "5"),
    ("claim: I am a member", "claimed_without_being_a_member", "5"),
    ("claim: the map is the head's", "claimed_under_an_older_map", "5"),
    ("claim: member and head", "claimed_under_an_older_map", "5"),
    ("claim: nothing", "claimed_while_it_runs", "1"),
    ("vote: write-once", "voted_twice", "9"),
    ("vote: migration unchanged", "voted_on_what_is_decided", "6"),
    ("update_run: it is mine", "switched_after_another_took_over", "1"),
    ("release: it is mine", "released_after_another_took_over", "1"),
    ("report_trouble: nobody runs the slot", "trouble_while_it_runs", "1"),
    ("report_trouble: I am a member", "trouble_without_being_a_member", "5"),
    ("report_trouble: the map is the head's", "trouble_of_an_older_map", "5"),
    ("finish_op: no leaver has come back", "finished_when_the_leaver_is_back", "11"),
    ("finish_op: as read", "finished_after_it_was_cancelled", "12"),
    ("withdraw_drain: head unchanged", "cancelled_after_the_commit", "12"),
    ("register: nobody of that name", "registered_over_another_life", "1"),
    ("register: who lives is not buried", "cut_off_after_it_was_buried_by_mistake", "1"),
    ("update_member: it is mine", "updated_by_another_life", "10"),
    ("map: the incarnation counts", "restarted", "7"),
    ("judge: a failed node is back", "back_before_the_commit", "1"),
    ("coordinator: parked workers are resumed", "back_before_the_commit", "15"),
    ("node: what cannot be undone is decided on one revision", "heard_of_half_a_commit", "18"),
    ("coordinator: waits for a cut-off host's fence", "cut_off_while_its_steps_go_on", "1"),
    ("lease: a new lease alone protects nothing", "slow_after_a_new_lease", "1"),
    ("lease: self-fence", "cut_off_while_its_steps_go_on", "1"),
]
"""Mutation, and the stray request (or slow agent) that shows it."""


def test_every_mutation_is_accounted_for() -> None:
    proven = {m[0] for m in LATE} | {m[0] for m in STALE} | set(DRAINS) | set(HEALED) | set(GIVEN_UP)
    assert proven == set(MUTATIONS)


@pytest.mark.parametrize(("mutation", "case", "number"), STALE, ids=[f"{m[0]}, {m[1]}" for m in STALE])
def test_a_stray_request_is_caught(mutation: str, case: str, number: str) -> None:
    with MUTATIONS[mutation](), pytest.raises(AssertionError, match=f"invariant {number}:"):
        deliver(case)


@pytest.mark.parametrize("case", CASES)
def test_a_stray_request_does_no_harm(case: str) -> None:
    deliver(case)


@pytest.mark.parametrize(("mutation", "story", "interlude", "name", "number"), LATE, ids=[f"{m[0]}, {m[2]}" for m in LATE])
def test_a_dropped_guard_is_caught(mutation: str, story: str, interlude: str, name: str, number: str) -> None:
    with MUTATIONS[mutation](), pytest.raises(AssertionError, match=f"invariant {number}:"):
        k = 0
        while play(story, interlude, k, name):
            k += 1


@pytest.mark.parametrize("mutation", DRAINS)
def test_a_dropped_order_is_caught(mutation: str) -> None:
    with MUTATIONS[mutation](), pytest.raises(AssertionError, match=f"invariant {DRAINS[mutation]}:"):
        for seed in range(60, 90):
            drains(seed)


@pytest.mark.parametrize("mutation", HEALED)
def test_a_missing_rule_is_caught(mutation: str) -> None:
    with MUTATIONS[mutation](), pytest.raises(AssertionError, match="invariant 15:"):
        for seed in range(30):
            walk(seed, 400, 0.1, fresh=0.25)


@pytest.mark.parametrize("mutation", GIVEN_UP)
def test_a_stuck_slot_is_caught(mutation: str) -> None:
    with MUTATIONS[mutation](), pytest.raises(AssertionError, match=GIVEN_UP[mutation]):
        deliver("claimed_and_given_away")
