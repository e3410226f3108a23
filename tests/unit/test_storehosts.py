"""A drain of a host that runs the job's store says what must not be switched off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_core import KEYS, running, seat

from tmrun.core import drains, foresight, storehosts
from tmrun.core.decision import Timers
from tmrun.core.membership import Job
from tmrun.core.model import Host, Leader, Operation, OpState, Term, Verb


def keeping(members: int, *hosts: str) -> Job:
    """These run the store."""
    job = running((KEYS.leader, Leader(Host("a"), seat("a").incarnation, 1)), (KEYS.term, Term(1)))
    told = {h: replace(m, value=replace(m.value, store_members=members if h in hosts else 0)) for h, m in job.members.items()}
    return replace(job, members=told)


@pytest.mark.parametrize(
    ("job", "asked", "said"),
    [
        (keeping(1, "b"), "a", ""),
        (keeping(1, "a"), "a", "a runs the job's only store: switched off, the job ends"),
        (keeping(3, "a", "b", "s"), "a", "a runs 1 of the 3 etcds of the job's store, of which only 1 may be off"),
        (keeping(3, "a", "b", "s"), "ab", "a, b run 2 of the 3 etcds of the job's store: switched off, the job ends"),
    ],
)
def test_the_warning(job: Job, asked: str, said: str) -> None:
    hosts = tuple(map(Host, asked))
    assert storehosts.warning(job, hosts) == said
    notes = foresight.drain(job, hosts, ()).notes
    assert (said in notes) if said else not any("store" in note for note in notes)


def test_the_end_of_a_drain() -> None:
    op = Operation("d-1", Verb.DRAIN, (Host("s"),), state=OpState.OPEN)
    for job, said in ((keeping(0), "s drained (safe to power off)"), (keeping(1, "s"), "s drained (s runs the job's only store")):
        assert drains._finish(job, op, Timers(), 0.0).say.startswith(said)
