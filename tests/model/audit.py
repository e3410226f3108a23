"""The invariants of PROTOCOL.md as predicates on a simulated world; checked after every micro-step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training import Worker, require

from tmrun.core import migration as judging
from tmrun.core import node, planner, reconcile
from tmrun.core.membership import Job, fold
from tmrun.core.model import Host, JobState, Kind, Migration, NodeState, OpState, Phase, RankMap, Seat, Verb, Vote
from tmrun.core.states import known_hosts, node_state
from tmrun.core.txn import Listing, Txn

if TYPE_CHECKING:
    from world import World

AS_LEADER = ("propose", "commit", "abort", "initial map", "restart map", "finish", "tell")
"""Names of the transactions that only the coordinator of the newest term may write."""


def new_moves(job: Job) -> bool:
    """The migration that was just proposed moves ranks: going on in place is nobody's replacement."""
    return job.migration is not None and bool(job.migration.value.moves)


@dataclass
class Audit:
    """Remembers what must never change; ``wrote`` sees every transaction, ``check`` every state."""

    world: World
    revision: int = 0
    maps: dict[int, str] = field(default_factory=dict)
    decided: dict[int, Phase] = field(default_factory=dict)
    votes: dict[tuple[int, Host], str] = field(default_factory=dict)
    ended_ops: dict[str, OpState] = field(default_factory=dict)
    term: int = 0
    started: set[tuple[int, Seat]] = field(default_factory=set)
    history: list[str] = field(default_factory=list)

    # -- every write
    def wrote(self, who: Seat, txn: Txn, before: Listing, after: Listing) -> None:
        """A transaction of an agent was tried."""
        if after.revision == before.revision:
            return
        old, new = fold(self.world.keys, before.entries), fold(self.world.keys, after.entries)
        self.history.append(f"{who.host}: {txn.name}")
        self._lawful(who, txn, old, new)
        if txn.name.startswith(AS_LEADER):
            leader = old.leader.value if old.leader else None
            good = leader is not None and leader.incarnation == who.incarnation and old.term is not None
            require(good, "8", f"{who.host} writes {txn.name!r}, but the coordinator is {leader}")
        if new.map is not None and new.epoch != old.epoch:
            self._new_map(old, new, new.map)
        if new.migration is not None and (old.migration is None or old.migration.value.id != new.migration.value.id):
            self._new_migration(old, new.migration.value)
        for host, vote in new.answers.items():
            ballot = vote.value.migration, host
            if ballot not in self.votes:
                self._new_vote(old, vote.value)
                self.votes[ballot] = str(vote.value)
            require(self.votes[ballot] == str(vote.value), "9", f"the vote of {host} changed to {vote.value}")

    def _lawful(self, who: Seat, txn: Txn, old: Job, new: Job) -> None:
        """What has to be true of the state that a transaction really met, whatever its sender believed."""
        what = f"{who.host}.{who.incarnation}: {txn.name}"
        verb = txn.name.split()[0]
        if verb == "elect":
            require(old.leader is None, "8", f"{what}, but {old.leader} leads")
            before = old.term.value.number if old.term else 0
            require(new.term is not None and new.term.value.number == before + 1, "8", f"{what} after term {before}")
            require(old.alive(who), "8", f"{what}, who is no member")
        elif verb == "register":
            require(who.host not in old.members, "1", f"{what}: {old.members.get(who.host)} is registered")
        elif verb == "propose":
            require(old.open_migration is None, "4", f"{what}: {old.open_migration} is open")
            require(old.pause is None or "failure" not in txn.name or not new_moves(new), "17", f"{what}: the job is paused")
        elif verb == "restart":
            require(old.pause is None, "17", f"{what}: the job is paused")
        elif verb == "vote":
            require(old.open_migration is not None and f"migration {old.open_migration.id}" in txn.name, "6", f"{what}: that is decided")
            require(who.host not in old.votes, "9", f"{what}: it has voted")
        elif txn.name.startswith(("claim", "switch", "release", "report trouble")):
            self._lawful_run(who, what, txn, old)
        elif verb == "end" and new.end is not None and new.end.state is JobState.STOPPED:
            stay = [s.host for s in (old.map.seats if old.map else ()) if s.host not in self.world.told_to_go]
            require(not stay, "19", f"{what}: nobody told {stay} to go")
        elif verb == "update":
            require(old.alive(who), "10", f"{what}: it is no member")

    def _lawful_run(self, who: Seat, what: str, txn: Txn, old: Job) -> None:
        slot = int(txn.name.split("slot ")[1].split()[0])
        holder = old.runs.get(slot)
        if txn.name.startswith(("switch", "release")):
            mine = holder is not None and holder.value.incarnation == who.incarnation
            require(mine, "1", f"{what}: it is held by {holder}")
            return
        require(holder is None, "1", f"{what}: it is held by {holder}")
        require(old.map is not None and old.map.seats[slot] == who, "5", f"{what}: the map names {old.map and old.map.seats[slot]}")
        require(old.alive(who), "5", f"{what}: it is no member")
        if txn.name.startswith("claim"):
            require(old.trouble(slot) is None, "5", f"{what}: it has given it up")

    def _new_map(self, old: Job, new: Job, current: RankMap) -> None:
        require(current.epoch == old.epoch + 1, "4", f"epoch {current.epoch} follows epoch {old.epoch}")
        assert old.spec is not None
        require(len(current.seats) == old.spec.nnodes, "3", f"epoch {current.epoch} has {len(current.seats)} slots")
        hosts = Counter(s.host for s in current.seats)
        require(max(hosts.values()) == 1, "3", f"epoch {current.epoch} names a host twice: {hosts}")
        if current.kind in (Kind.INITIAL, Kind.RESTART):
            require(current.generation == current.epoch, "7", f"a start map has generation {current.generation}")
            for slot, seat in enumerate(old.map.seats if old.map else ()):
                member = old.members.get(seat.host)
                gone = member is None or member.value.incarnation != seat.incarnation or old.trouble(slot) or old.draining(seat.host)
                # withdrawn after the coordinator looked: the slot's run key still keeps its successor from starting
                withdrawn = any(seat.host in op.hosts and op.state is OpState.CANCELLED for op in old.ops.values())
                require(
                    gone or withdrawn or current.seats[slot] == seat,
                    "1",
                    f"epoch {current.epoch} takes slot {slot} from {seat.host}, which may still run it",
                )
            return
        assert old.map is not None
        require(old.open_migration is not None, "4", f"epoch {current.epoch} is committed with no open migration")
        assert old.open_migration is not None
        self._required_votes(old, old.open_migration, current)
        require(current.generation == old.map.generation, "7", "a migration changed the generation")
        moved = {m.slot for m in current.moves}
        for slot, seat in enumerate(current.seats):
            require(slot in moved or old.map.seats[slot] == seat, "7", f"slot {slot} changed its seat without a move")
        for move in current.moves:
            require(old.alive(move.joiner), "5", f"epoch {current.epoch} is committed to {move.joiner}, which is no member")
            there = current.kind is not Kind.DRAIN or old.alive(move.leaver)
            require(there, "9", f"epoch {current.epoch} counts on {move.leaver} to hand over, which is no member")
            running = current.kind is Kind.FAILURE and move.slot in old.runs
            require(not running, "1", f"epoch {current.epoch} replaces slot {move.slot}, which {old.runs.get(move.slot)} still runs")

    def _required_votes(self, old: Job, migration: Migration, current: RankMap) -> None:
        roles = judging.required(old, migration)
        said = {seat: old.votes[seat.host].value for seat in roles if seat.host in old.votes}
        for seat, role in roles.items():
            vote = said.get(seat)
            good = vote is not None and vote.yes and vote.incarnation == seat.incarnation
            require(good, "6", f"epoch {current.epoch} is committed without the yes of {role} {seat.host} (it said {vote})")
        stops = {v.stop_step for v in said.values() if v.stop_step is not None}
        wanted = {current.resume.target} if migration.kind is Kind.DRAIN else set()
        require(stops == wanted, "6", f"epoch {current.epoch} is committed for steps {stops}")

    def _new_migration(self, old: Job, migration: Migration) -> None:
        assert old.term is not None and old.head is not None
        require(
            migration.term == old.term.value.number, "8", f"migration {migration.id} of term {migration.term} is written in term {old.term}"
        )
        require(old.head.value.open == 0, "4", f"migration {migration.id} is opened while {old.head.value.open} is open")
        for move in migration.moves:
            require(
                not old.cordoned(move.joiner.host), "3", f"migration {migration.id} moves slot {move.slot} to drained {move.joiner.host}"
            )
            require(old.alive(move.joiner), "5", f"migration {migration.id} moves slot {move.slot} to {move.joiner}, which is no member")
            if migration.kind is Kind.FAILURE:
                holder = old.runs.get(move.slot)
                require(holder is None, "1", f"migration {migration.id} replaces slot {move.slot}, which {holder} still runs")

    def _new_vote(self, old: Job, vote: Vote) -> None:
        member = old.members.get(vote.host)
        good = member is not None and member.value.incarnation == vote.incarnation
        require(good, "9", f"{vote.incarnation} votes, but is no member")

    def spawned(self, who: Seat, effect: node.Spawn) -> None:
        """Active workers start: once a generation and seat, and in the slot that the map of that epoch gives."""
        require((effect.generation, who) not in self.started, "7", f"{who} starts its workers of generation {effect.generation} twice")
        self.started.add((effect.generation, who))

    def kills(self, me: node.Node, effect: node.Kill) -> None:
        """An agent ends its workers: not because it has heard of half a transaction."""
        if me.group is not None and not me.group.failed:
            now = reconcile.reconcile(me, fold(self.world.keys, self.world.store.listing(self.world.keys.ctl).entries))
            require(isinstance(now, node.Kill), "18", f"{me.me.host} ends its workers ({effect.reason}), but the store says {now}")

    # -- every state
    def check(self) -> None:
        """All state predicates."""
        if self.world.store.revision != self.revision:
            self.revision = self.world.store.revision
            self._check_store(self.world.job())
        self._check_workers()

    def _check_store(self, job: Job) -> None:
        for kv in self.world.store.listing(self.world.keys.maps).entries:
            epoch = int(kv.key.rsplit("/", 1)[1])
            require(self.maps.setdefault(epoch, kv.value) == kv.value, "4", f"the map of epoch {epoch} was rewritten")
        require(sorted(self.maps) == list(range(1, job.epoch + 1)), "4", f"maps {sorted(self.maps)}, head {job.epoch}")
        if job.map is not None:
            self.world.training.maps[job.epoch] = job.map
        if job.migration is not None:
            self._check_migration(job, job.migration.value)
        if job.term is not None:
            require(job.term.value.number >= self.term, "8", f"term {job.term.value.number} after {self.term}")
            self.term = job.term.value.number
        self._check_ops(job)
        self._check_nodes(job)

    def _check_migration(self, job: Job, migration: Migration) -> None:
        if migration.phase is not Phase.PREPARING:
            before = self.decided.setdefault(migration.id, migration.phase)
            require(before is migration.phase, "4", f"migration {migration.id} was {before.value} and is {migration.phase.value}")
            require(job.open_migration is None, "4", f"migration {migration.id} is decided and still open")
        assert job.map is not None
        if job.map.kind in (Kind.DRAIN, Kind.FAILURE):
            committed = job.map.migration == migration.id
            require(committed == (migration.phase is Phase.COMMITTED), "4", f"{migration} and the map of epoch {job.epoch} disagree")

    def _check_ops(self, job: Job) -> None:
        for op in job.ops.values():
            if op.state is OpState.OPEN:
                require(op.id not in self.ended_ops, "12", f"request {op.id} is open again")
                continue
            if op.id not in self.ended_ops and op.state is OpState.DONE:
                for host in op.hosts:
                    require(not job.runs_on(host), "11", f"request {op.id} is done, but {host} holds a slot")
                    left = [str(w) for w in self.world.training.living() if w.seat.host == host and self._there(w)]
                    require(not left, "11", f"request {op.id} is done, but processes live: {left}")
            if op.id not in self.ended_ops and op.state is OpState.CANCELLED and op.verb is Verb.DRAIN:
                seated = job.map is None or any(job.map.slot_of_host(h) is not None for h in op.hosts)
                require(seated, "12", f"request {op.id} is cancelled, but it had been carried out")
            before = self.ended_ops.setdefault(op.id, op.state)
            require(before is op.state, "12", f"request {op.id} was {before.value} and is {op.state.value}")

    def _check_nodes(self, job: Job) -> None:
        seated = {s.host for s in job.map.seats} if job.map else set()
        for host in known_hosts(job):
            state, _ = node_state(job, host)
            if state in (NodeState.STANDBY, NodeState.WARMING):
                require(host not in seated, "10", f"standby {host} holds a slot")
        for member in planner.standbys(job):
            slot = job.map.slot_of_host(member.host) if job.map else None
            good = slot is None or job.map is None or job.trouble(slot) is not None or job.map.seats[slot] != member.seat
            require(good, "10", f"{member.host} may be chosen as a joiner and holds slot {slot}")

    def _there(self, worker: Worker) -> bool:
        """A process that may still do something; one that is parked on a host that is cut off may not."""
        agent = self.world.agents[worker.seat.host]
        cut_off = worker.waits and agent.me == worker.seat and agent.silent
        return (worker.seated and not cut_off) or worker.state == "hand"

    def _check_workers(self) -> None:
        training, job_epoch = self.world.training, len(self.maps)
        ranks: dict[int, str] = {}
        for worker in training.workers:
            if not worker.computes:
                continue
            require(worker.rank not in ranks, "1", f"two processes are rank {worker.rank}: {ranks.get(worker.rank)}, {worker}")
            ranks[worker.rank] = str(worker)
            require(worker.epoch <= job_epoch, "5", f"{worker} is ahead of the head, epoch {job_epoch}")
            seat = training.maps[worker.epoch].seats[worker.rank // training.spec.nproc]
            require(seat == worker.seat, "5", f"{worker} is {worker.seat}, but the map of epoch {worker.epoch} names {seat}")
        able = training.able_epochs()
        require(len(able) < 2, "2", f"several epochs could complete a step: {sorted(able)}")
