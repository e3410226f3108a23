"""The agent's one lease: register, stay registered, and stop the workers when the lease may have run out elsewhere.

    held --the store says it is gone--> lost --new lease, same incarnation--> held       (workers go on; the slot is claimed again)
    held --no renewal for PARK_SHARE of the TTL, no proof newer than PARK_PROOF_SHARE--> the workers are told to park
         --... FENCE_SHARE, PROOF_SHARE, and not all are parked--> fenced: workers killed before anybody else may take the slot
    The agent goes on trying in either case.

A store outage alone kills nothing: completed steps prove that every rank of the epoch lives, and nobody can be elected or commit anything.
Nor does one in which a peer dies or hangs: workers that are parked can do nothing before a commit that reaches them through us; they keep
their state for the job, as long as one would wait for a node.
The proof is as old as the vote before the last completed one, not as its end: what arrives late on a link that heals proves nothing new.
Times are this machine's own (CLOCK_BOOTTIME), counted from the send time of the last acknowledged renewal.
May not know: slots, migrations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tmrun.core import codec, node, transactions
from tmrun.core.errors import UsageError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import FENCE_SHARE, PARK_PROOF_SHARE, PARK_SHARE, PROOF_SHARE, Member
from tmrun.store.api import KeepAlive, Store
from tmrun_agent.feeders import Fenced, Parked

if TYPE_CHECKING:
    from tmrun_agent.loop import Agent

WATCH_S = 0.1


@dataclass
class Lease:
    """Owned by the loop's thread. ``on_lost`` is called from the store's thread."""

    store: Store
    ttl_s: int
    on_lost: Callable[[int], None]
    clock: Callable[[], float]
    interrupted: int = 0
    _id: int = 0
    _alive: KeepAlive | None = None
    _lost: bool = False
    _parked: bool = False
    _fenced: bool = False
    _patience_s: float = 0.0
    """How long workers that are parked may keep their state for a job that is not heard of."""
    _unsafe_since: float = float("inf")
    """Last renewal before the registration was lost; a new lease protects nothing before this agent is registered under it."""

    def acquire(self) -> int:
        """A new lease, kept alive from now on."""
        if self._alive is not None:
            self._alive.close()
            self._unsafe_since = min(self._unsafe_since, self._alive.last_renewed)
        lease = self.store.grant(self.ttl_s)
        self._alive = self.store.keep_alive(lease, self.ttl_s, lambda: self.on_lost(lease))
        self._id, self._lost = lease, False
        return lease

    def lost(self, lease: int) -> None:
        """The store said so; news of an older lease is ignored."""
        self._lost = self._lost or lease == self._id

    def release(self) -> None:
        """Give the lease up now, so that nobody has to wait for it to expire."""
        if self._alive is not None:
            self._alive.close()
        self.store.revoke(self._id)

    def tend(self, agent: Agent) -> int | None:
        """Once a turn, before anything else. An exit code: this agent has to end."""
        if self.interrupted:
            return 128 + self.interrupted
        self._fenced = self._fenced and self.silent
        self._parked = self._parked and self._out_of_touch
        if self._lost:
            agent.node = node.observe(agent.node, node.Leased(self.acquire()))
        job = agent.job()
        stays = job.map is not None and agent.me in job.map.seats and not job.draining(agent.me.host)  # a leaver's end is waited for
        self._patience_s = job.spec.node_wait_s if job.spec is not None and stays else 0.0
        if not job.alive(agent.me):
            if agent.views.loaded:
                self._adopt(agent)
        else:
            self._unsafe_since = float("inf")
        return None

    def watch(self, agent: Agent) -> None:
        """Start the thread that ends workers in time even while the loop waits for a store that does not answer."""

        def run() -> None:
            while True:
                time.sleep(WATCH_S)
                agent.beacon.add("ticks")  # the launcher ends an agent that does not even get here
                if self._out_of_touch and agent.runs_a_slot:
                    self._stop(agent, self.clock() - agent.proven_at)

        threading.Thread(target=run, name="fence", daemon=True).start()

    def _stop(self, agent: Agent, proof_s: float) -> None:
        """Out of touch: softly, then hard. ``proof_s``: age of the proof that all ranks lived."""
        what = f"no lease renewal for {self.silent_s:.1f} s and no step completed"
        if proof_s > self.ttl_s * PARK_PROOF_SHARE and not self._parked and not agent.health.parked():
            self._parked = True
            agent.park()
            agent.inbox.put(Parked(what))
        if self.silent and proof_s > self.ttl_s * PROOF_SHARE and not self._fenced and not self._harmless(agent):
            self._fenced = True
            agent.processes.kill(gently=False)
            agent.inbox.put(Fenced(what))

    @property
    def renewed_at(self) -> float:
        """When the newest renewal that was answered was asked for."""
        return self._alive.last_renewed if self._alive is not None else float("-inf")

    @property
    def answer_s(self) -> float:
        """How long the store takes to answer, lately; 0 if unknown."""
        return self._alive.answer_s if self._alive is not None else 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since this agent was last surely registered."""
        assert self._alive is not None
        return self.clock() - min(self._alive.last_renewed, self._unsafe_since)

    @property
    def silent(self) -> bool:
        """True when others may soon take this agent for dead: it must not start anything."""
        return self.silent_s > self.ttl_s * FENCE_SHARE

    @property
    def _out_of_touch(self) -> bool:
        return self.silent_s > self.ttl_s * PARK_SHARE

    def _harmless(self, agent: Agent) -> bool:
        """Its workers can do nothing, and not for too long yet."""
        return agent.health.parked() and self.silent_s < self._patience_s

    def _adopt(self, agent: Agent) -> None:
        """Same life of this agent, another registration: its slot is still its own unless the map says otherwise.

        Tried until it is seen: the first answer may have been lost, or a lost answer may have tied it to a lease that is over.
        """
        if agent.submit(transactions.register(agent.job(), agent.member, self._id)):
            agent.publisher.event(f"{agent.member.host}: its lease was lost; registered again")


def enter(lease: Lease, keys: Keys, member: Member, tell: Callable[[str], None], pause: Callable[[float], None]) -> int:
    """Be in the job under a new lease, which is returned. May be tried again. Raises StoreError, UsageError, and what ``pause`` does."""
    granted = lease.acquire()
    register(lease.store, keys, member, granted, lease.ttl_s, tell, pause)
    return granted


def register(
    store: Store, keys: Keys, member: Member, lease: int, ttl_s: int, tell: Callable[[str], None], pause: Callable[[float], None]
) -> None:
    """Join the job. An earlier life of this host may still be registered: wait for its lease to run out. ``pause``: for so many seconds.
    Raises StoreError, UsageError, and what ``pause`` does."""
    deadline = time.monotonic() + 2 * ttl_s + 5
    told = False
    while True:
        if store.commit(transactions.register(Job(keys), member, lease)).succeeded:
            return
        entry = store.get(keys.member(member.host))
        holder = None if entry is None else codec.decode(Member, entry.value)
        if holder is not None and holder.incarnation == member.incarnation:
            return  # it was done, and the answer was lost
        if time.monotonic() > deadline:
            raise UsageError(f"node name {member.host!r} is held by another live agent of job {keys.job!r}; choose one with --node-name")
        if not told:
            tell(f"{member.host}: waiting for an earlier registration of this name to expire{_elsewhere(holder, member)}")
        told = True
        pause(0.2)


def _elsewhere(holder: Member | None, member: Member) -> str:
    """What to do if the name is another host's, which its address suggests."""
    if holder is None or holder.address == member.address:
        return ""
    return f"; it is from {holder.address}, this host is {member.address}: if these are two hosts, give each a --node-name of its own"
