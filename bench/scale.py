"""How far one etcd carries a job: N simulated agents on real connections, through a launch, a drain and a mass loss.

    python bench/scale.py 1000 [--json FILE] [--ttl 20] [--processes 2] [--loss 3]

Every agent has its own store (connection, lease, keep-alive, watches), views and ``core.node``, and sends the transactions that a real
one sends; its workers are make-believe: they join, warm up, prepare and switch at once. The elected agent runs ``core.coordinator``. The
agents of one process take turns on a few threads, so that the figures of time are those of *this machine's CPUs*, not of N machines; what
carries over is what the store did: its CPU seconds, bytes, transactions, leases. May not know: workers, torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import random
import resource
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))

from tmrun_agent.views import Views

from tmrun import procs
from tmrun.core import coordinator, node, planner, reconcile, transactions
from tmrun.core.decision import Timers
from tmrun.core.errors import LeaseGone, OutcomeUnknown, StoreError
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, fold
from tmrun.core.model import Host, Incarnation, Kind, Member, Operation, Spec, Verb, WorkerVote
from tmrun.core.txn import Txn
from tmrun.store.api import Resync, WatchEvent
from tmrun.store.embedded import EmbeddedEtcd
from tmrun.store.etcd import EtcdStore
from tmrun.store.etcd_watch import EtcdWatch

KEYS = Keys("scale")
TURNERS = 8
"""Threads that take turns, a process."""
PACE_S = 0.1
Say = Callable[..., None]


# -- one agent ----------------------------------------------------------------------------------------------------------------------
@dataclass
class Agent:
    """A simulated agent; ``turn`` does at most one thing and says whether there may be more to do."""

    name: str
    endpoint: str
    spec: Spec
    say: Say
    tally: Counter[str]
    wake: Callable[[Agent], None]
    facts: deque[node.Fact] = field(default_factory=deque)
    timers: Timers = field(default_factory=Timers)
    dead: bool = False
    campaign_at: float = 0.0
    waits: str = ""
    _epoch: int = 0

    def __post_init__(self) -> None:
        self.store = Counting(self.endpoint, self.tally, deadline_s=30.0, try_s=15.0)
        self.member = Member(Host(self.name), Incarnation(f"{random.getrandbits(48):012x}"), "10.0.0.1", os.getpid(), "bench")

    def join(self) -> None:
        """Lease, keep-alive, registration, watches: as ``tmrun_agent`` does."""
        self.lease = self.store.grant(self.spec.lease_ttl_s)
        self.kept = self.store.keep_alive(self.lease, self.spec.lease_ttl_s, self.lost)
        self.node = node.Node(self.member.seat, self.lease)
        job = Job(KEYS)
        txn = transactions.register(job, self.member, self.lease)
        assert self.store.commit(txn).succeeded
        self.tally["txns"] += 1
        self.views = Views(self.store, KEYS, self.name, lambda: self.wake(self))

    def lost(self) -> None:
        """The store dropped the lease: the figure that must be 0, except for those that the bench revokes itself."""
        self.say("lost", self.name)
        self.dead = True

    def turn(self) -> bool:
        """One turn of the loop: fold, one effect or one decision."""
        if self.dead or not hasattr(self, "views"):
            return False
        while self.facts:
            self.node = node.observe(self.node, self.facts.popleft())
        job = self._fold()
        if self.views.want(reconcile.concerns(self.node, job), everything=self._leads(job)):
            job = self._fold()
        if not self.views.loaded:
            return False
        if job.epoch != self._epoch:
            self._epoch = job.epoch
            self.say("epoch", self.name, job.epoch)
        if job.spec is None:
            return False
        effect = reconcile.reconcile(self.node, job)
        if effect is not None:
            return self.execute(effect, job)
        return self.coordinate(job)

    def _fold(self) -> Job:
        entries = self.views.snapshot()
        began = time.thread_time()
        job = fold(KEYS, entries)
        self.tally["fold_us"] += int((time.thread_time() - began) * 1e6)
        self.tally["folds"] += 1
        return job

    def execute(self, effect: node.Effect, job: Job) -> bool:  # noqa: C901  one case an effect
        """What the workers of this node would do, at once."""
        group = self.node.group
        match effect:
            case node.Spawn():
                pids = tuple(range(1, self.spec.nproc + 1))
                self.facts.append(node.Spawned(node.Group(effect.purpose, effect.slot, effect.epoch, effect.generation, pids)))
                fact = node.WorkerJoined if effect.purpose is node.Purpose.ACTIVE else node.WorkerWarm
                self.facts.extend(fact(i) for i in range(self.spec.nproc))
            case node.Kill():
                assert group is not None
                self.facts.append(node.Killing(effect.reason))
                self.facts.extend(node.Exited(p, 137) for p in group.pids)
            case node.Prepare():
                self.facts.append(node.Sent(effect))
                self.facts.extend(self._answers(effect, job))
            case node.Commit():
                self.facts.append(node.Sent(effect))
                leaves = effect.slot < 0
                self.facts.extend((node.WorkerLeft if leaves else node.WorkerJoined)(i) for i in range(self.spec.nproc))
                if leaves and group is not None:
                    self.facts.extend(node.Exited(p, 0) for p in group.pids)
            case node.Abort():
                self.facts.append(node.Sent(effect))
            case node.Submit():
                if self.submit(effect.txn) and effect.then is not None:
                    self.facts.append(effect.then)
            case node.Note():
                self.facts.append(effect.fact)
            case node.Quit():
                self.dead = True
                return False
        return True

    def _answers(self, effect: node.Prepare, job: Job) -> Iterator[node.Fact]:
        migration = effect.migration
        joins = any(m.joiner == self.member.seat for m in migration.moves)
        moved = tuple(r for m in migration.moves for r in self.spec.ranks(m.slot))
        for local, rank in enumerate(self.spec.ranks(effect.slot)):
            groups = frozenset({"world", "data"})
            if joins:
                answer = node.Answer(groups=groups)
            elif migration.kind is Kind.DRAIN:
                answer = node.Answer(100, None, groups)
            else:
                answer = node.Answer(None, WorkerVote(rank, 100, 100, moved, witnessed={99: moved}), groups)
            yield node.WorkerAnswered(local, migration.id, answer)

    def coordinate(self, job: Job) -> bool:
        """As ``tmrun_agent.loop``: campaign when nobody leads, decide when elected."""
        now = time.monotonic()
        if job.end is not None:
            return False
        if job.leader is None:
            if self.member.host in job.members and now >= self.campaign_at:
                self.campaign_at = now + random.uniform(0, 0.5)
                return self.submit(transactions.elect(job, self.member.seat, self.lease))
            return False
        if not self._leads(job) or not self.views.sees_all:
            return False
        self.timers = coordinator.observe(self.timers, job, now)
        began = time.thread_time()
        decision = coordinator.decide(job, self.timers, now)
        self.tally["decide_us"] += int((time.thread_time() - began) * 1e6)
        self.tally["decides"] += 1
        if decision.txn is None:
            if decision.reason[:40] != self.waits:
                self.waits = decision.reason[:40]
                self.say("waits", self.name, decision.reason)
            return False
        done = self.submit(decision.txn)
        if done:
            self.say("decided", self.name, decision.txn.name)
        return done

    def submit(self, txn: Txn) -> bool:
        """As ``tmrun_agent.loop``: then see what it did."""
        self.tally["txns"] += 1
        self.tally["written"] += sum(len(getattr(op, "value", "")) for op in txn.ops)
        try:
            result = self.store.commit(txn)
        except OutcomeUnknown:
            self.tally["unknown"] += 1
            self.refresh()
            return False
        if not result.succeeded or not self.views.wait_for(txn, result.revision, 0.5):
            self.refresh()
        return result.succeeded

    def _leads(self, job: Job) -> bool:
        return job.leader is not None and job.leader.value.incarnation == self.member.incarnation

    def refresh(self) -> None:
        """Read anew what is watched."""
        self.tally["lists"] += 1
        self.views.refresh()


class Counting(EtcdStore):
    """Counts what its watches are told."""

    def __init__(self, endpoint: str, tally: Counter[str], **limits: float) -> None:
        super().__init__(endpoint, **limits)  # type: ignore[arg-type]
        self._tally = tally

    def watch_all(self, feeds: Mapping[str, Callable[[WatchEvent], None]]) -> EtcdWatch:
        """See ``Store``; ``watch`` is one of these too."""
        return super().watch_all({prefix: self._counted(on_event) for prefix, on_event in feeds.items()})

    def _counted(self, on_event: Callable[[WatchEvent], None]) -> Callable[[WatchEvent], None]:
        def count(event: WatchEvent) -> None:
            self._tally["resyncs" if isinstance(event, Resync) else "events"] += 1
            on_event(event)

        return count


# -- one process of agents ----------------------------------------------------------------------------------------------------------
def host_agents(names: list[str], endpoint: str, spec: Spec, orders: Any, reports: Any) -> None:
    """Entry point of a process: join all, then take turns until told to end."""
    parent = multiprocessing.parent_process()
    procs.die_with_parent(parent.pid if parent is not None and parent.pid is not None else os.getppid())
    _more_files()
    grpc._common.MAXIMUM_WAIT_TIMEOUT = 5.0  # else each stream's thread wakes ten times a second: too much for hundreds in one process
    ready: list[queue.SimpleQueue[Agent | None]] = [queue.SimpleQueue() for _ in range(TURNERS)]
    queued: set[str] = set()
    tally: Counter[str] = Counter()

    def wake(agent: Agent) -> None:
        if agent.name not in queued:
            queued.add(agent.name)
            ready[hash(agent.name) % TURNERS].put(agent)

    def say(*what: Any) -> None:
        reports.put((time.monotonic(), *what))

    agents = [Agent(n, endpoint, spec, say, tally, wake) for n in names]
    threading.Thread(target=_join_all, args=(agents, say), daemon=True).start()
    threading.Thread(target=_obey, args=(orders, agents, tally, say, ready), daemon=True).start()
    turners = [threading.Thread(target=_take_turns, args=(mine, queued, wake, say)) for mine in ready]
    for turner in turners:
        turner.start()
    for turner in turners:
        turner.join()
    os._exit(0)  # thousands of streams: closing each in turn would take longer than the measurement


def _take_turns(ready: queue.SimpleQueue[Agent | None], queued: set[str], wake: Callable[[Agent], None], say: Say) -> None:
    """News that come within ``PACE_S`` are one turn's: what a real agent's inbox does while it folds, and N agents on one machine must."""
    while (agent := ready.get()) is not None:
        if ready.empty():
            time.sleep(PACE_S)
        queued.discard(agent.name)
        try:
            while agent.turn():
                pass
        except LeaseGone:
            agent.dead = True
        except StoreError as error:
            say("error", agent.name, str(error))


def _join_all(agents: list[Agent], say: Say) -> None:
    for agent in agents:
        try:
            agent.join()
        except StoreError as error:
            say("error", agent.name, str(error))
    say("joined")


def _obey(orders: Any, agents: list[Agent], tally: Counter[str], say: Say, ready: Any) -> None:
    """``tick``: turn everybody once (the coordinator's clock); ``tally``: report; ``end``."""
    while True:
        try:
            order = orders.get(timeout=0.25)
        except queue.Empty:
            for agent in agents:
                if hasattr(agent, "node"):
                    _tick(agent)
            continue
        if order == "tally":
            say("tally", dict(tally), resource.getrusage(resource.RUSAGE_SELF).ru_utime + resource.getrusage(resource.RUSAGE_SELF).ru_stime)
        elif order == "end":
            for mine in ready:
                mine.put(None)
            return
        else:
            _revoke([a for a in agents if a.name in order], say)
            say("revoked")


def _revoke(victims: list[Agent], say: Say) -> None:
    for agent in victims:
        agent.dead = True
        agent.kept.close()
        try:
            agent.store.revoke(agent.lease)
        except StoreError as error:
            say("error", agent.name, str(error))


def _tick(agent: Agent) -> None:
    """Only a coordinator, one who may become it, or an idle standby has something to do without news."""
    if not hasattr(agent, "views"):
        return
    seen = next((kv for kv in agent.views.snapshot() if kv.key == KEYS.leader), None)
    if seen is None or agent.member.incarnation in seen.value:
        agent.wake(agent)


def _more_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# -- the measurement ----------------------------------------------------------------------------------------------------------------
class Bench:
    """Starts the processes, collects what they report, asks the store the rest."""

    def __init__(self, hosts: int, options: argparse.Namespace) -> None:
        self.hosts, self.options = hosts, options
        standby = max(2, hosts * 5 // 100)
        self.spec = Spec(hosts - standby, options.nproc, standby, ("bench",), lease_ttl_s=options.ttl, join_wait_s=3600.0)
        self.etcd = EmbeddedEtcd()
        self.process = psutil.Process(self.etcd.pid)
        with contextlib.suppress(psutil.AccessDenied):  # the agents would not share its cores
            self.process.nice(-10)
        self.store = EtcdStore(self.etcd.endpoint, deadline_s=60.0, try_s=30.0)
        self.reports: Any = multiprocessing.Queue()
        self.waits = ""
        self.lost: list[str] = []
        self.errors: Counter[str] = Counter()
        self.epochs: dict[int, dict[str, float]] = {}
        self.decided: list[tuple[float, str]] = []
        self.tallies: list[tuple[dict[str, int], float]] = []
        self.joined = self.revoked = 0
        self.rss = 0
        self.figures: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """All phases; what was measured."""
        began_all = time.monotonic()
        self.store.commit(transactions.create_spec(Job(KEYS), self.spec))
        names = [f"node{i}" for i in range(self.hosts)]
        count = self.options.processes
        self.orders = [multiprocessing.Queue() for _ in range(count)]
        children = [
            multiprocessing.Process(target=host_agents, args=(names[i::count], self.etcd.endpoint, self.spec, self.orders[i], self.reports))
            for i in range(count)
        ]
        self._phase("launch", lambda: [c.start() for c in children], self._launched)
        self._phase("drain", lambda: self._drain(names[0]), self._drained)
        self.revoked_at = time.monotonic()
        victims = names[1 : 1 + max(1, self.hosts * self.options.loss // 100)][: self.spec.standby - 1]
        for order in self.orders:
            order.put(victims)
        self._until(lambda: self.revoked == count)
        self.victims = victims
        self._phase("loss", lambda: None, self._replaced)
        for order in self.orders:
            order.put("tally")
        self._until(lambda: len(self.tallies) == count)
        for order in self.orders:
            order.put("end")
        for child in children:
            child.join(20)
            child.kill()
        self._finish(time.monotonic() - began_all)
        self.store.close()
        self.etcd.close()
        return self.figures

    # -- phases
    def _phase(self, name: str, start: Callable[[], object], done: Callable[[], bool]) -> None:
        cpu, began = self._cpu(), time.monotonic()
        self.began = began
        start()
        ok = self._until(done)
        wall = time.monotonic() - began
        settle = time.monotonic() + 600
        quiet = self._revision()
        while time.monotonic() < settle and ok:  # what this phase still makes happen (claims, warm-ups) counts for it, not for the next
            self._collect(2.0)
            if quiet == (quiet := self._revision()):
                break
        spent = self._cpu() - cpu
        self.figures[f"{name}_s"] = round(wall, 3) if ok else None
        self.figures[f"{name}_quiet_s"] = round(time.monotonic() - began, 1)
        self.figures[f"{name}_etcd_cpu_s"] = round(spent, 2)
        print(
            f"  {name}: {wall:.1f} s{'' if ok else f' TIMED OUT ({self.waits})'}, etcd {spent:.1f} CPU s, {self._rss_mb():.0f} MB",
            flush=True,
        )

    def _launched(self) -> bool:
        return self.joined == self.options.processes and len(self.epochs.get(1, {})) >= self.hosts and self._all_run()

    def _all_run(self) -> bool:
        job = self._job()
        joined = sum(r.value.joined for r in job.runs.values())
        return joined == self.spec.nnodes and len(planner.standbys(job)) >= self.spec.standby

    def _drain(self, host: str) -> None:
        op = Operation("d1", Verb.DRAIN, (Host(host),), "bench")
        job = self._job()
        if self.store.commit(transactions.request(job, op)).succeeded:
            self.requested = time.monotonic()

    def _drained(self) -> bool:
        return len(self.epochs.get(2, {})) >= self.hosts

    def _replaced(self) -> bool:
        return len(self.epochs.get(3, {})) >= self.hosts - len(self.victims)

    # -- reports
    def _collect(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                self._take(self.reports.get(timeout=left))
            except queue.Empty:
                break
        self.rss = max(self.rss, self.process.memory_info().rss)

    def _take(self, report: tuple[Any, ...]) -> None:
        match report:
            case (_, "joined"):
                self.joined += 1
            case (_, "revoked"):
                self.revoked += 1
            case (_, "waits", name, why):
                self.waits = f"{name}: {why[:200]}"
            case (_, "lost", name):
                self.lost.append(name)
            case (_, "error", name, text):
                self.errors[text[:120]] += 1
            case (at, "epoch", name, epoch):
                self.epochs.setdefault(epoch, {})[name] = at
            case (at, "decided", _, name):
                self.decided.append((at, name))
            case (_, "tally", tally, cpu):
                self.tallies.append((tally, cpu))

    def _until(self, done: Callable[[], bool]) -> bool:
        end = time.monotonic() + self.options.limit
        while time.monotonic() < end:
            self._collect(0.25)
            if done():
                return True
        return False

    def _job(self) -> Job:
        return fold(KEYS, self.store.list(KEYS.ctl).entries)

    def _revision(self) -> int:
        return self.store.list(KEYS.head).revision

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def _rss_mb(self) -> float:
        return float(self.process.memory_info().rss) / 2**20

    def _at(self, name: str) -> float | None:
        return next((at for at, what in self.decided if what.startswith(name)), None)

    def _finish(self, wall: float) -> None:
        f = self.figures
        total: Counter[str] = Counter()
        for tally, _ in self.tallies:
            total.update(tally)
        spans = {
            "drain": (self.requested, self._at("propose drain"), self._at("commit epoch 2"), 2),
            "loss": (self.revoked_at, self._at("propose failure"), self._at("commit epoch 3"), 3),
        }
        for name, (start, proposed, committed, epoch) in spans.items():
            seen = self.epochs.get(epoch, {})
            f[f"{name}_propose_s"] = _gap(start, proposed)
            f[f"{name}_votes_and_commit_s"] = _gap(proposed, committed)
            f[f"{name}_seen_by_all_s"] = _gap(committed, max(seen.values(), default=None))
        listing = self.store.list(KEYS.root)
        f |= {
            "hosts": self.hosts, "slots": self.spec.nnodes, "standby": self.spec.standby, "nproc": self.spec.nproc,
            "ttl_s": self.spec.lease_ttl_s,
            "victims": len(self.victims), "lost_leases": len([n for n in self.lost if n not in self.victims]),
            "txns": total["txns"], "lists": total["lists"] + total["resyncs"], "events": total["events"], "unknown": total["unknown"],
            "fold_ms": round(total["fold_us"] / max(1, total["folds"]) / 1e3, 3), "folds": total["folds"],
            "decide_ms": round(total["decide_us"] / max(1, total["decides"]) / 1e3, 3),
            "written_mb": round(total["written"] / 2**20, 2), "keys": len(listing.entries),
            "ctl_mb": round(sum(len(kv.key) + len(kv.value) for kv in listing.entries) / 2**20, 2),
            "vote_bytes": max((len(kv.value) for kv in listing.entries if KEYS.parse(kv.key)[0] == "vote"), default=0),
            "etcd_rss_mb": round(self.rss / 2**20), "etcd_cpu_share": round(self._cpu() / wall, 3),
            "agents_cpu_s": round(sum(c for _, c in self.tallies), 1), "wall_s": round(wall, 1), "errors": dict(self.errors),
        }  # fmt: skip


def _gap(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else round(b - a, 3)


def main() -> int:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", type=int, nargs="*", default=[1000])
    parser.add_argument("--ttl", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--processes", type=int, default=0, help="0: one for 75 agents")
    parser.add_argument("--loss", type=int, default=3, help="percent of the hosts whose leases are revoked at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a phase may take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _more_files()
    multiprocessing.set_start_method("spawn")
    asked, rows = options.processes, []
    for hosts in options.hosts:
        load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        options.processes = asked or max(2, hosts // 75)
        print(f"{hosts} agents, {options.processes} processes, TTL {options.ttl} s, {load}", flush=True)
        rows.append({**Bench(hosts, options).run(), "load": os.getloadavg()[0], "cores": os.cpu_count()})
    for name in rows[0]:
        print(f"{name:28}" + "".join(f"{row.get(name)!s:>14}" for row in rows))
    print("measured with real connections to one embedded etcd on this machine, which the agents share; see bench/scale.py for how")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
