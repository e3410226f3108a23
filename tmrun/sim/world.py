"""One job's records as its agents would have left them, and its coordinator: the production core over the in-memory store.

Production: every record is written by ``core.transactions``, read by ``core.membership.fold``, decided on by ``core.coordinator`` (and with
it planner, migration, policy). Modelled: *when* an agent writes, and the votes of stayers, which all say yes at one instant and are handed
to the coordinator's snapshot without passing through the store (``crowd``): the one shortcut that makes 8,192 nodes cheap.
May not know: what a fault costs, what work was lost, strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tmrun.core import coordinator, decision, membership, migration, restarts, transactions
from tmrun.core.codec import encode
from tmrun.core.decision import Decision, Timers
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, Stored, fold
from tmrun.core.model import (
    FENCED_SHARE,
    UNSEEN_SHARE,
    Done,
    Host,
    Incarnation,
    Kind,
    Member,
    Operation,
    Run,
    Seat,
    Spec,
    Trouble,
    Verb,
    Vote,
)
from tmrun.core.txn import Delete, Op, Put, Txn
from tmrun.sim.snapshot import Snapshot
from tmrun.store.memory import MemoryWorld

KEPT_MAPS = 24
"""Maps that are kept as they are, for decisions that look back on the last failures: a job of weeks commits thousands, each as long as
the job is wide."""
FORGET_EVERY = 64
"""Epochs after which the decoder's cache, which keeps every map it has seen, is emptied."""
_FOREVER = float("inf")


class JobWorld:
    """Hosts are numbers; ``node17`` is what the core calls host 17."""

    def __init__(self, spec: Spec, now: float = 0.0) -> None:
        self.spec = spec
        self.keys = Keys("sim")
        self.store = MemoryWorld(auto=False)
        self.store.clock.now = now
        self.client = self.store.client("sim")
        self.timers = Timers()
        self.said = ""
        """Why the coordinator waits."""
        self.leader = -1
        self._snapshot = Snapshot(self.keys)
        self._lives: dict[int, int] = {}
        self._seats: dict[int, Seat] = {}
        self._leases: dict[int, int] = {}
        self._pruned = 0
        self.client.watch(self.keys.ctl, self._snapshot.hear)
        membership.forget()  # what the decoder keeps of an earlier job
        assert self.client.commit(transactions.create_spec(Job(self.keys), spec)).succeeded

    # -- who is who
    @staticmethod
    def host(number: int) -> Host:
        """A host's name."""
        return Host(f"node{number}")

    @staticmethod
    def number(host: Host) -> int:
        """The host of that name."""
        return int(host[4:])

    def seat(self, number: int) -> Seat:
        """This host in its present life."""
        return self._seats[number]

    def registered(self, number: int) -> bool:
        """Its lease lives."""
        return number in self._leases

    # -- what agents write
    def register(self, number: int, *, warm: bool, labels: Mapping[str, str]) -> None:
        """A new life of the host."""
        life = self._lives[number] = self._lives.get(number, 0) + 1
        self._seats[number] = Seat(self.host(number), Incarnation(f"{number}.{life}"))
        lease = self._leases[number] = self.client.grant(_FOREVER)  # type: ignore[arg-type]  # it ends when the simulation says so
        seat = self.seat(number)
        member = Member(seat.host, seat.incarnation, "", 1, "sim", warm, dict(labels))
        self._write(transactions.register(Job(self.keys), member, lease))

    def leave(self, number: int) -> None:
        """Its lease has run out, or it ended in order: what it held under the lease is gone."""
        self.client.revoke(self._leases.pop(number))

    def warm(self) -> list[int]:
        """Hosts whose standby processes are parked."""
        return [self.number(host) for host, member in self.job().members.items() if member.value.warm]

    def set_warm(self, number: int, *, warm: bool) -> None:
        """Its standby processes are parked, or are not any more."""
        member = self.job().members[self.host(number)].value
        if member.warm != warm:
            view = self._view(self.keys.member(member.host))
            self._write(transactions.update_member(view, replace(member, warm=warm), self._leases[number]))

    def claim(self, slot: int, number: int, *, joined: bool) -> None:
        """Take the slot's run key, or say that its workers have reached ``run.steps``."""
        view = self._view(self.keys.run(slot), self.keys.trouble(slot), self.keys.member(self.host(number)))
        self._claim(view, slot, number, joined=joined)

    def _claim(self, view: Job, slot: int, number: int, *, joined: bool) -> None:
        seat = self.seat(number)
        run = Run(slot, seat.host, seat.incarnation, view.epoch, (), joined)
        held = view.runs.get(slot)
        if held is None:
            self._write(transactions.claim(view, run, self._leases[number]))
        elif held.value != run:
            self._write(transactions.update_run(view, run, self._leases[number]))

    def release(self, slot: int, after: Trouble | Done | None = None) -> None:
        """The processes of a slot are gone: its holder says so."""
        held = self._view(self.keys.run(slot)).runs.get(slot)
        if held is not None:
            view = self._view(self.keys.run(slot), self.keys.leaving(held.value.host))
            self._write(transactions.release(view, slot, after))

    def trouble(self, slot: int, number: int, text: str, *, code: int = 137, software: bool = False) -> bool:
        """A host tells that the workers of its slot have ended, and gives the slot's run key up. False: another still holds the key."""
        view = self._view(self.keys.run(slot), self.keys.member(self.host(number)))
        seat, rank = self.seat(number), slot * self.spec.nproc
        trouble = Trouble(slot, seat.host, seat.incarnation, view.epoch, rank, code, text, software)
        held = slot in view.runs and view.runs[slot].value.incarnation == seat.incarnation
        return self._write(transactions.release(view, slot, trouble) if held else transactions.report_trouble(view, trouble), must=held)

    def vote(self, number: int, *, stop_step: int | None = None) -> None:
        """A joiner or a leaver is prepared."""
        host = self.host(number)
        view = self._view(self.keys.member(host), self.keys.vote(host))
        assert view.migration is not None
        answer = Vote(host, self.seat(number).incarnation, view.migration.value.id, True, stop_step=stop_step)
        self._write(transactions.vote(view, answer))

    def drain(self, number: int, op: str, reason: str) -> bool:
        """An operator asks; False when the host is being drained already."""
        host = self.host(number)
        view = self._view(self.keys.admin(host))
        return not view.draining(host) and self._write(transactions.request(view, Operation(op, Verb.DRAIN, (host,), reason)), must=False)

    def undrain(self, number: int) -> None:
        """The host may hold ranks again; an open request is cancelled."""
        host = self.host(number)
        view = self._view(self.keys.admin(host))
        if host not in view.admins:
            return
        op = self._view(self.keys.op(view.admins[host].op)).open_ops()
        self._write(transactions.withdraw_drain(view, (host,), op[0] if op else None, "the host came back"))

    def forget_op(self, op: str) -> None:
        """A request that is finished; people read it for a while, a simulation of years does not."""
        self._write(Txn((), (Delete(self.keys.op(op)),), "forget the request"))

    def _write(self, txn: Txn, *, must: bool = True) -> bool:
        done = self.client.commit(txn).succeeded
        assert done or not must, txn
        return done

    def _view(self, *keys: str) -> Job:
        """What one agent sees: the common records and the named ones."""
        entries = [e for k in (*self._common(), *keys) if (e := self.store.get(k)) is not None]
        return fold(self.keys, entries)

    def _common(self) -> Iterator[str]:
        yield from (self.keys.spec, self.keys.head, self.keys.term, self.keys.leader)
        head = self.job().head
        if head is not None:
            yield from (self.keys.map(head.value.epoch), self.keys.migration(head.value.last))

    # -- the coordinator
    def job(self) -> Job:
        """The coordinator's snapshot, with the crowd's votes on the open migration."""
        self.store.pump()
        return self._snapshot.job()

    def crowd(self, votes: Mapping[Host, Stored[Vote]], migration: int) -> None:
        """The stayers' votes on the open migration."""
        self._snapshot.crowd(votes, migration)

    def decide(self, now: float, electable: Callable[[int], bool] = lambda _: True) -> Decision:
        """One decision of whoever is elected, executed. Nothing to do: ``txn`` is None. ``electable``: this host's agent lives."""
        self.store.clock.now = now
        job = self.job()
        if job.leader is None:
            self.timers = Timers()  # of the new coordinator, which has seen nothing yet
            self.leader = min(filter(electable, self._leases), default=-1)
            if self.leader < 0:
                return Decision(None, "nobody is here")
            self._write(transactions.elect(job, self.seat(self.leader), self._leases[self.leader]))
            job = self.job()
        self.timers = coordinator.observe(self.timers, job, now)
        decision = coordinator.decide(job, self.timers, now)
        self.said = decision.reason
        if decision.txn is not None:
            self._write(decision.txn)
            self._prune(job)
        return decision

    def missing(self) -> bool:
        """Votes on the open migration are still awaited."""
        job = self.job()
        opened = job.open_migration
        return opened is not None and any(s.host not in job.votes for s in migration.required(job, opened))

    def wakes(self, now: float) -> float:
        """When to ask again although nothing has happened: the next of the core's own time limits to pass."""
        ttl, spec = self.spec.lease_ttl_s, self.spec
        limits = {
            "migration": spec.prepare_deadline_s,
            "taking": spec.prepare_deadline_s,
            "parked": max(0.0, ttl * FENCED_SHARE - coordinator.idle_s(self.job())),
            "gone": ttl * UNSEEN_SHARE,
            "suspect": ttl,
            "doubt": ttl * decision.DOUBT_SHARE,
            "short": spec.node_wait_s,
            "trains": restarts.LASTED_S,
            "runs": restarts.LASTED_PLAIN_S,
        }
        every = sorted(set(limits.values()))  # of a timer that is not known here
        due = [
            seen + limit + 1e-3
            for what, seen in self.timers.seen.items()
            for limit in ([limits[what.split()[0]]] if what.split()[0] in limits else every)
        ]
        return min((t for t in due if t > now), default=_FOREVER)

    def _prune(self, job: Job) -> None:
        """Old migrations and their maps are read by nobody; of an old restart only that there was one."""
        if job.map is None or job.epoch <= self._pruned:
            return
        self._pruned = job.epoch
        old = job.epoch - KEPT_MAPS
        ops: list[Op] = [Delete(self.keys.comm(old))]
        entry = self.store.get(self.keys.map(old))
        for past in fold(self.keys, [entry] if entry is not None else []).maps:
            slim = replace(past, seats=(), places=())
            key = self.keys.map(old)
            ops.append(Put(key, encode(slim)) if past.kind is Kind.RESTART else Delete(key))
        last = job.head.value.last if job.head else 0
        ops += [Delete(self.keys.migration(n)) for n in range(max(1, last - 60), last - 20)]
        self.client.commit(Txn((), tuple(ops), "prune"))
        if job.epoch % FORGET_EVERY == 0:
            membership.forget()

    # -- the start
    def launch(self, hosts: Mapping[int, Mapping[str, str]], now: float) -> None:
        """All hosts (number -> labels) are here: the core seats them; those that get no slot are warm standbys."""
        for number, labels in hosts.items():
            self.register(number, warm=False, labels=labels)
        self.decide(now)
        if self.job().map is None:
            self.decide(now + self.spec.join_wait_s + 1)
        self.start_workers()
        seated = self.seats()
        for number in hosts:
            if number not in seated:
                self.set_warm(number, warm=True)
        self.settle(now)

    def start_workers(self) -> None:
        """Every seat's workers reach ``run.steps`` in the newest generation."""
        job = self.job()
        for number, slot in self.seats().items():
            self._claim(job, slot, number, joined=True)

    def stop_workers(self) -> None:
        """Every seat's workers end, as at a restart."""
        job = self.job()
        for slot in job.runs:
            self._write(transactions.release(job, slot))

    def settle(self, now: float) -> list[Decision]:
        """Decide until there is nothing left to do."""
        made: list[Decision] = []
        while (decision := self.decide(now)).txn is not None:
            made.append(decision)
            assert len(made) < 100, [d.reason for d in made[-5:]]
        return made

    def seats(self) -> dict[int, int]:
        """Host -> the slot that it holds in its present life, by the newest map."""
        current = self.job().map
        pairs = ((self.number(s.host), s, i) for i, s in enumerate(current.seats if current else ()))
        return {number: slot for number, seat, slot in pairs if self.registered(number) and self.seat(number) == seat}
