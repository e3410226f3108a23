"""Ways to break the protocol: drop one guard of one transaction, or one rule of the coordinator, the node or the lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import world as worlds

from tmrun.core import drains, idle, living, losses, reconcile, resync, transactions
from tmrun.core import migration as judging
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import Kind, Seat
from tmrun.core.txn import Delete, Guard, Txn

KEYS = Keys("job")
Mutation = Callable[[], Any]


def without(name: str, *keys: str) -> Mutation:
    """Transaction ``name`` loses its guards on keys that contain one of ``keys``."""

    @contextmanager
    def mutate() -> Iterator[None]:
        original: Callable[..., Txn] = getattr(transactions, name)

        def dropped(*args: Any, **kwargs: Any) -> Txn:
            txn = original(*args, **kwargs)
            kept = tuple(g for g in txn.guards if not _on(g, keys))
            return replace(txn, guards=kept)

        with mock.patch.object(transactions, name, dropped):
            yield

    return mutate


def keeping(name: str, *keys: str) -> Mutation:
    """Transaction ``name`` deletes nothing at keys that contain one of ``keys``."""
    original: Callable[..., Txn] = getattr(transactions, name)

    def kept(*args: Any, **kwargs: Any) -> Txn:
        txn = original(*args, **kwargs)
        return replace(txn, ops=tuple(o for o in txn.ops if not (isinstance(o, Delete) and KEYS.parse(o.key)[0] in keys)))

    return instead(transactions, name, kept)


def _on(guard: Guard, keys: tuple[str, ...]) -> bool:
    return KEYS.parse(guard.key)[0] in keys


def instead(where: object, name: str, value: Any) -> Mutation:
    """``where.name`` is something else."""
    return lambda: mock.patch.object(where, name, value)


def _alive_whoever(self: Job, seat: Seat) -> bool:
    return seat.host in self.members


def _leaver_without(kind: Kind, *keys: str) -> Mutation:
    """Migrations of this kind know less of their leavers."""
    original = transactions._leaver_guard

    def guards(job: Job, which: Kind, move: Any) -> tuple[Guard, ...]:
        return tuple(g for g in original(job, which, move) if which is not kind or not _on(g, keys))

    return instead(transactions, "_leaver_guard", guards)


def _eager_commit() -> Mutation:
    """Do not wait for the fence of a host that may only be cut off."""
    return instead(losses, "confirmed", lambda job, slot: True)


def _never_back() -> Mutation:
    """Go on although the failed node is there again."""
    original = judging.judge

    def judge(job: Job, migration: Any, waited_s: float) -> Any:
        verdict = original(job, migration, waited_s)
        if isinstance(verdict, judging.Abort) and verdict.reason.endswith("is back"):
            return judging._count(job, migration, judging.required(job, migration)) or judging.Wait("")
        return verdict

    return instead(judging, "judge", judge)


def _prepare_first() -> Mutation:
    """Tell workers of a newer migration before an older commit."""
    original = living._migration

    def migration(me: Any, job: Job, group: Any) -> Any:
        if job.open_migration is not None:
            return living._prepare(me, job, group, job.open_migration)
        return original(me, job, group)

    return instead(living, "_migration", migration)


MUTATIONS: dict[str, Mutation] = {
    "elect: term as read": without("elect", "term"),
    "elect: I am a member": without("elect", "member"),
    "start: leader": without("start", "leader"),
    "start: head unchanged": without("start", "head"),
    "propose: leader": without("propose", "leader"),
    "propose: head unchanged": without("propose", "head"),
    "propose: members unchanged": without("propose", "member"),
    "propose: joiner not drained": without("propose", "admin"),
    "propose: not paused since": without("propose", "pause"),
    "start: not paused since": without("start", "pause"),
    "commit: leader": without("commit", "leader"),
    "commit: head unchanged": without("commit", "head"),
    "commit: members unchanged": without("commit", "member"),
    "propose, commit: failed slot's member key": _leaver_without(Kind.FAILURE, "member"),
    "start: who loses a seat has not come back": without("start", "member"),
    "propose, commit: drained slot's member key": _leaver_without(Kind.DRAIN, "member"),
    "abort: leader": without("abort", "leader"),
    "abort: head unchanged": without("abort", "head"),
    "commit: leader and head": without("commit", "leader", "head"),
    "abort: leader and head": without("abort", "leader", "head"),
    "propose: leader and head": without("propose", "leader", "head"),
    "start: leader and head": without("start", "leader", "head"),
    "claim: member and head": without("claim", "member", "head"),
    "claim: nothing": without("claim", "run", "member", "head"),
    "vote: member and migration": without("vote", "member", "migration"),
    "vote: migration unchanged": without("vote", "migration"),
    "vote: write-once": without("vote", "vote"),
    "vote: I am a member": without("vote", "member"),
    "claim: nobody runs the slot": without("claim", "run"),
    "claim: I am a member": without("claim", "member"),
    "claim: the map is the head's": without("claim", "head"),
    "claim: I have not given it up": without("claim", "trouble"),
    "update_run: it is mine": without("update_run", "run"),
    "release: it is mine": without("release", "run"),
    "report_trouble: nobody runs the slot": without("report_trouble", "run"),
    "report_trouble: I am a member": without("report_trouble", "member"),
    "report_trouble: the map is the head's": without("report_trouble", "head"),
    "finish_op: leader": without("finish_op", "leader"),
    "finish_op: no leaver has come back": without("finish_op", "member"),
    "finish_op: as read": without("finish_op", "op", "admin"),
    "withdraw_drain: head unchanged": without("withdraw_drain", "head"),
    "register: nobody of that name": without("register", "member"),
    "register: who lives is not buried": keeping("register", "obituary"),
    "update_member: it is mine": without("update_member", "member"),
    "map: the incarnation counts": instead(Job, "alive", _alive_whoever),
    "coordinator: waits for a cut-off host's fence": _eager_commit(),
    "coordinator: a leaver owes word": instead(drains, "_may_still_run", lambda *_: False),
    "judge: a failed node is back": _never_back(),
    "coordinator: parked workers are resumed": instead(resync, "decide", lambda *_: None),
    "node: a commit before a newer prepare": _prepare_first(),
    "node: gives up what it claimed in vain": instead(idle, "_stray_claim", lambda *_: None),
    "node: a start map wants new processes": instead(reconcile, "_seated_unprepared", lambda *_: False),
    "node: what cannot be undone is decided on one revision": instead(reconcile, "unsure", lambda *_: False),
    "lease: self-fence": instead(worlds.Agent, "fence", lambda self: False),
    "lease: a new lease alone protects nothing": instead(worlds.Agent, "unsafe_since", property(lambda s: float("inf"), lambda s, v: None)),
}
