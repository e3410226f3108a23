"""The workers of a simulated job: the contract of ``tmrun.wire`` as a small state machine, one action at a time.

    start ──all ranks are here──> loop ──step, step, ...──> done (exit 0)
    loop  ──a drain's stop step──> stop ──commit──> loop in the next epoch, or (the leaver) hand ──joiner has it──> exit 0
    loop, stop ──a failure's Prepare, or a peer is missing──> park ──commit──> loop in the next epoch; a drain's leaver ──commit──> exit
    rehearse ──> warm ──Prepare──> bound ──commit──> receive ──state is there──> loop

A step is a collective: every rank *enters* it, and once all have, each *passes* it by itself; so one rank can have passed a step that
another saw fail. That is what makes the agreement on the next step of a failure worth testing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tmrun.core.model import Kind, Migration, RankMap, Seat, Spec, WorkerVote
from tmrun.core.node import Answer, Exited, Fact, WorkerAnswered, WorkerDoubts, WorkerJoined, WorkerLeft, WorkerWarm

LEAD = 3
"""Steps that still run between the agreement on a stop step and the stop; more than real workers take, for faults to strike in between."""
LOST = 76
"""Exit code of a worker that lost what it cannot be without (its agent, the sender of its state); not the program's own error."""


class Violation(AssertionError):
    """An invariant of PROTOCOL.md does not hold."""


def require(good: bool, number: str, text: str) -> None:
    """Raise ``Violation`` with the invariant's number."""
    if not good:
        raise Violation(f"invariant {number}: {text}")


@dataclass(frozen=True)
class Prepare:
    migration: Migration
    rank: int


@dataclass(frozen=True)
class Commit:
    map: RankMap


@dataclass(frozen=True)
class Abort:
    migration: int


Message = Prepare | Commit | Abort


@dataclass(eq=False)
class Worker:
    """One training process."""

    pid: int
    seat: Seat
    local: int
    rank: int
    epoch: int
    generation: int
    state: str
    step: int = 0
    """Updates applied = the step that runs next."""
    entered: bool = False
    broken: bool = False
    """Its communicators were shut down, or a peer is missing: nothing goes on before a failure migration."""
    stuck: bool = False
    """Does nothing any more, and does not end by itself either."""
    unlucky: bool = False
    """The next step that it could pass fails for it, although all have entered."""
    pending: Migration | None = None
    voted: float = 0.0
    """When it entered its last step of this epoch, 0 if it has not."""
    before: float = 0.0
    """... and the step before."""
    idle_since: float = 0.0
    commit: RankMap | None = None
    stop: int | None = None
    said: int = 0
    """Migration it answered last."""
    exit: int | None = None
    later: Prepare | None = None
    """Heard after a commit that is not carried out yet."""
    inbox: deque[Message] = field(default_factory=deque)

    @property
    def lives(self) -> bool:
        return self.exit is None

    @property
    def computes(self) -> bool:
        """Acts as its rank: at most one of these a rank may exist. One that waits can only be told to go on, or to end."""
        return self.lives and not self.waits and self.seated

    @property
    def waits(self) -> bool:
        """For a decision, which only its agent can tell it."""
        return self.state in ("park", "stop")

    @property
    def seated(self) -> bool:
        """Is a rank of the job, or was: it has not noticed that another took over."""
        receives = self.state == "receive" and self.commit is not None and self.commit.kind is Kind.FAILURE
        return self.state in ("start", "loop", "stop", "park") or receives

    def __str__(self) -> str:
        return f"{self.seat.host} rank {self.rank} (pid {self.pid}, epoch {self.epoch}, {self.state}, step {self.step})"


@dataclass
class Training:
    """All processes of the job, dead ones included, and the collectives that connect them."""

    spec: Spec
    total: int
    replicated: bool = True
    workers: list[Worker] = field(default_factory=list)
    entered: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    ready: dict[tuple[int, int, int, int], set[int]] = field(default_factory=dict)
    facts: dict[Seat, list[Fact]] = field(default_factory=dict)
    received: set[tuple[int, int]] = field(default_factory=set)
    """(epoch, rank) whose joiner has its state."""
    completed: list[tuple[int, int, int]] = field(default_factory=list)
    """(generation, epoch, step) of every step that all ranks entered, in that order."""
    maps: dict[int, RankMap] = field(default_factory=dict)
    proven: dict[Seat, float] = field(default_factory=dict)
    """All ranks are known to have lived after this."""
    now: float = 0.0

    # -- what agents do to processes
    def spawn(self, seat: Seat, local: int, rank: int, epoch: int, generation: int, *, standby: bool) -> int:
        worker = Worker(1000 + len(self.workers), seat, local, rank, epoch, generation, "rehearse" if standby else "start")
        self.workers.append(worker)
        return worker.pid

    def of(self, seat: Seat) -> list[Worker]:
        return [w for w in self.workers if w.seat == seat and w.lives]

    def living(self) -> list[Worker]:
        return [w for w in self.workers if w.lives]

    def end(self, worker: Worker, code: int) -> None:
        if worker.lives:
            worker.exit = code
            self._tell(worker, Exited(worker.pid, code))

    def park(self, seat: Seat) -> None:
        """All processes of a node that can are stopped where they are, at once."""
        for worker in self.of(seat):
            if worker.state == "loop" and not worker.stuck:
                worker.broken = True
                self._loop(worker)

    def send(self, pid: int, message: Message) -> None:
        next(w for w in self.workers if w.pid == pid).inbox.append(message)

    def _tell(self, worker: Worker, fact: Fact) -> None:
        self.facts.setdefault(worker.seat, []).append(fact)

    # -- one action
    def act(self, worker: Worker) -> str:
        """The next thing this process does; empty when it can only wait."""
        if not worker.lives or worker.stuck:
            return ""
        if worker.inbox:
            return self._hear(worker, worker.inbox.popleft())
        action = getattr(self, f"_{worker.state}")(worker)
        assert isinstance(action, str)
        return action

    def _hear(self, worker: Worker, message: Message) -> str:
        match message:
            case Prepare(migration, rank):
                return self._prepare(worker, migration, rank)
            case Commit(current):
                if worker.pending is not None and worker.pending.id == current.migration:
                    worker.commit = current
                return f"hears of commit {current.epoch}"
            case Abort(number):
                if worker.pending is not None and worker.pending.id == number and worker.commit is None:
                    worker.pending = worker.stop = None
                if worker.later is not None and worker.later.migration.id == number:
                    worker.later = None
                if self._leaves(worker) and worker.commit is not None and worker.commit.migration == number and not self._at_stop(worker):
                    worker.broken = True
                return f"hears of abort {number}"

    def _prepare(self, worker: Worker, migration: Migration, rank: int) -> str:
        what = f"is told to prepare {migration.kind.value} {migration.id}"
        if worker.state in ("rehearse", "warm", "bound"):
            worker.pending, worker.rank = migration, rank
            if worker.state == "bound":
                worker.state = "warm"
            return what
        require(worker.rank == rank, "7", f"{worker} is told to prepare as rank {rank}")
        untold = worker.pending is not None and worker.commit is None and worker.pending.id != migration.id
        decided = untold and any(m.migration == worker.pending.id for m in self.maps.values())  # type: ignore[union-attr]
        require(not decided, "5", f"{worker} is told of migration {migration.id} before the commit of its last one")
        if self._first_the_commit(worker, migration):
            worker.later = Prepare(migration, rank)
            return what + " (later)"
        if worker.commit is not None and worker.commit.kind is Kind.DRAIN and worker.state in ("loop", "park"):
            worker.commit = None  # its step cannot be reached any more
        if worker.state in ("start", "receive", "hand") or worker.commit is not None:
            self._tell(worker, WorkerAnswered(worker.local, migration.id, Answer(refused=f"rank {worker.rank} is in {worker.state}")))
            worker.broken = worker.broken or migration.kind is Kind.FAILURE
            return what + ", refuses"
        worker.pending, worker.stop = migration, None
        if migration.kind is Kind.FAILURE:
            worker.broken = True
        return what

    def _first_the_commit(self, worker: Worker, migration: Migration) -> bool:
        """It carries out what is committed before it turns to ``migration``."""
        if worker.commit is None:
            return False
        if worker.commit.kind is Kind.DRAIN:
            on_its_way = worker.state == "loop" and migration.kind is Kind.DRAIN
            return self._at_stop(worker) or worker.state == "receive" or on_its_way
        return worker.state == "park"

    def _leaves(self, worker: Worker) -> bool:
        current = worker.commit
        return current is not None and worker.seat in {m.leaver for m in current.moves}

    def _at_stop(self, worker: Worker) -> bool:
        return worker.state == "stop" or (worker.state == "loop" and worker.stop == worker.step and not worker.entered)

    # -- active
    def _alone(self, worker: Worker) -> bool:
        """Some process of its communicators has died (one that has not switched yet is only late)."""
        seats = self.maps[worker.epoch].seats
        here = {w.rank for w in self.workers if w.lives and w.state != "hand" and seats[w.rank // self.spec.nproc] == w.seat}
        return len(here) < self.spec.world

    def _dead_joiners(self, current: RankMap) -> set[int]:
        joiners = {m.joiner for m in current.moves}
        return {w.rank for w in self.workers if not w.lives and w.seat in joiners and w.pending and w.pending.id == current.migration}

    def _start(self, worker: Worker) -> str:
        if len({w.rank for w in self.workers if w.generation == worker.generation and w.lives and not w.broken}) < self.spec.world:
            return ""
        worker.state = "loop"
        self._tell(worker, WorkerJoined(worker.local))
        return "joins"

    def _loop(self, worker: Worker) -> str:
        if worker.broken:
            worker.state = "park"
            self._tell(worker, WorkerDoubts(worker.local, "lost a connection"))
            return f"parks in step {worker.step}"
        if worker.entered:
            return self._pass(worker)
        if worker.stop == worker.step:
            worker.state = "stop"
            return f"stops before step {worker.step}"
        if worker.step >= self.total:
            self.end(worker, 0)
            return "has finished"
        if worker.pending is not None and worker.pending.kind is Kind.DRAIN and self._built(worker):
            self.ready.setdefault((worker.pending.id, worker.generation, worker.epoch, worker.step), set()).add(worker.rank)
        self._enter(worker)
        return f"enters step {worker.step}"

    def _enter(self, worker: Worker) -> None:
        worker.entered = True
        key = (worker.generation, worker.epoch, worker.step)
        ranks = self.entered.setdefault(key, set())
        full = len(ranks) == self.spec.world
        ranks.add(worker.rank)
        worker.before, worker.voted, worker.idle_since = worker.voted, self.now, self.now
        if len(ranks) == self.spec.world and not full:
            self._complete(key)

    def _complete(self, key: tuple[int, int, int]) -> None:
        generation, epoch, step = key
        if self.completed:
            before = self.completed[-1]
            require(
                (generation, epoch) >= before[:2], "2", f"epoch {epoch} completes step {step} after epoch {before[1]} had completed one"
            )
            if generation == before[0]:
                good = step == before[2] + 1 or (epoch > before[1] and step == before[2])
                require(good, "17", f"step {step} of epoch {epoch} completes after step {before[2]} of epoch {before[1]}")
        self.completed.append(key)

    def _pass(self, worker: Worker) -> str:
        key = (worker.generation, worker.epoch, worker.step)
        full = len(self.entered[key]) == self.spec.world
        if full and not worker.unlucky:
            everybody_ready = worker.pending and len(self.ready.get((worker.pending.id, *key), ())) == self.spec.world
            worker.entered = False
            worker.step += 1
            if worker.before:
                self.proven[worker.seat] = max(worker.before, self.proven.get(worker.seat, 0.0))
            if everybody_ready and worker.pending and worker.stop is None:
                worker.stop = min(worker.step + LEAD, self.total)
                self._tell(worker, WorkerAnswered(worker.local, worker.pending.id, Answer(stop_step=worker.stop, groups={"world": ()})))
            return f"passes step {worker.step - 1}"
        if (worker.unlucky and full) or self._alone(worker):
            worker.unlucky, worker.broken = False, True
            return f"loses step {worker.step}"
        return ""

    def _built(self, worker: Worker) -> bool:
        """The new communicators connect once every member of them is at it."""
        migration = worker.pending
        assert migration is not None
        base = self.maps[migration.base_epoch]
        seats = [s for i, s in enumerate(base.seats) if i not in migration.slots]
        seats += [m.joiner for m in migration.moves]
        if migration.kind is Kind.DRAIN:
            seats += [m.leaver for m in migration.moves]
        at_it = {w.seat for w in self.workers if w.lives and w.pending == migration}
        return set(seats) <= at_it

    def _stop(self, worker: Worker) -> str:
        if worker.commit is not None:
            current, worker.stop = worker.commit, None
            require(current.resume.target == worker.step, "6", f"{worker} is told to switch at step {current.resume.target}")
            if current.seats[worker.rank // self.spec.nproc] != worker.seat:
                worker.state = "hand"
                return "hands over"
            self._switch(worker, current)
            return f"switches to epoch {current.epoch} at step {worker.step}"
        if worker.stop is None:
            worker.state = "loop"
            return "goes on"
        return ""

    def _switch(self, worker: Worker, current: RankMap) -> None:
        worker.epoch, worker.commit, worker.pending = current.epoch, None, None
        worker.entered = worker.broken = worker.unlucky = False
        worker.voted, worker.idle_since = 0.0, self.now
        worker.state = "loop"
        self._tell(worker, WorkerJoined(worker.local))
        later, worker.later = worker.later, None
        if later is not None:
            self._prepare(worker, later.migration, later.rank)

    def _park(self, worker: Worker) -> str:
        migration = worker.pending
        if self._leaves(worker):
            self.end(worker, LOST)
            return "ends: it cannot reach the step at which it was to hand over"
        if worker.commit is not None and worker.commit.kind is Kind.FAILURE:
            return self._resume(worker, worker.commit)
        if migration is None or migration.kind is not Kind.FAILURE or worker.said == migration.id or not self._built(worker):
            return ""
        worker.said = migration.id
        moved = tuple(r for m in migration.moves for r in self.spec.ranks(m.slot))
        witnessed = dict.fromkeys((worker.step - 1, worker.step), moved)
        idle_s = self.now - worker.idle_since
        answer = WorkerVote(worker.rank, worker.step, worker.step, moved if self.replicated else (), witnessed=witnessed, idle_s=idle_s)
        self._tell(worker, WorkerAnswered(worker.local, migration.id, Answer(vote=answer, groups={"world": ()})))
        return f"is parked before step {worker.step}"

    def _resume(self, worker: Worker, current: RankMap) -> str:
        target = current.resume.target
        done = len(self.entered.get((worker.generation, worker.epoch, worker.step), ())) == self.spec.world
        require(worker.step <= target, "17", f"{worker} has passed step {target} and is told to run it again")
        require(target <= worker.step + 1, "17", f"{worker} is told to go on at step {target}")
        require(target == worker.step or done, "17", f"{worker} is told to go on at step {target}, which nobody may have reached")
        how = "applies late and goes on at" if target > worker.step else "redoes" if worker.entered else "goes on at"
        worker.step = target
        self._switch(worker, current)
        return f"switches to epoch {current.epoch}: {how} step {target}"

    def _hand(self, worker: Worker) -> str:
        assert worker.commit is not None
        if (worker.commit.epoch, worker.rank) in self.received:
            self._tell(worker, WorkerLeft(worker.local))
            self.end(worker, 0)
            return "has left"
        if worker.rank in self._dead_joiners(worker.commit):
            self.end(worker, LOST)
            return "ends: nobody takes its state"
        return ""

    # -- standby
    def _rehearse(self, worker: Worker) -> str:
        worker.state = "warm"
        self._tell(worker, WorkerWarm(worker.local))
        return "is warm"

    def _warm(self, worker: Worker) -> str:
        if worker.pending is None or not self._built(worker):
            return ""
        worker.state = "bound"
        self._tell(worker, WorkerAnswered(worker.local, worker.pending.id, Answer(groups={"world": ()})))
        return f"is prepared as rank {worker.rank}"

    def _bound(self, worker: Worker) -> str:
        if worker.commit is not None:
            worker.state = "receive"
            worker.epoch, worker.generation = worker.commit.epoch, worker.commit.generation
            return "takes over"
        if worker.pending is None:
            worker.state = "warm"
            return "is parked again"
        return ""

    def _receive(self, worker: Worker) -> str:
        current = worker.commit
        assert current is not None
        if current.kind is Kind.DRAIN:
            leaver = next(m.leaver for m in current.moves if m.slot == worker.rank // self.spec.nproc)
            senders = [w for w in self.of(leaver) if w.rank == worker.rank]
            able = [w for w in senders if w.state == "hand"]
        else:
            source = current.resume.sources.get(worker.rank)
            senders = [w for w in self._sources(current) if w.rank == source and w.lives and not w.broken]
            able = [w for w in senders if w.epoch == current.epoch]
        if able:
            worker.step = current.resume.target
            self.received.add((current.epoch, worker.rank))
            self._switch(worker, current)
            return f"has its state, runs step {worker.step} in epoch {worker.epoch}"
        if not senders:
            self.end(worker, LOST)
            return "ends: the sender of its state is gone"
        return ""

    def _sources(self, current: RankMap) -> Iterator[Worker]:
        for seat in current.seats:
            for w in self.of(seat):
                if w.epoch == current.epoch or w.commit == current or (w.pending and w.pending.id == current.migration):
                    yield w

    # -- for invariants
    def able_epochs(self) -> set[tuple[int, int]]:
        """Epochs whose ranks are all there and could complete a collective."""
        ranks: dict[tuple[int, int], set[int]] = {}
        for w in self.workers:
            if w.lives and w.state == "loop" and not w.broken:
                ranks.setdefault((w.generation, w.epoch), set()).add(w.rank)
        return {e for e, r in ranks.items() if len(r) == self.spec.world}
