"""What the elected coordinator does next: one transaction at most, and why.

    all shut down   -> the job is stopped (``preemption``)
    no map          -> enough hosts? start epoch 1; not within ``node_wait_s`` (``shortage``): end
    a drain is late -> its node gives up its ranks, or in vain and its machine is being shut down (``drains``)
    a hang          -> name who keeps the others waiting, order its node to end its workers (``hang``); the rest is a failure
    open migration  -> judge it (``migration``)
    all slots done  -> end
    a slot failed   -> the program's own error: end, or restart within the budget (``restarts``); many nodes vanished at once: wait one
                       lease time for them (the breaker, ``losses``); a lost machine: move the slot to a standby; restart everybody when
                       moving is impossible (``attempts``); wait when no standby is warm (``failures``)
    ... and paused  -> say what is held back, do nothing
    ... or waits    -> finish requests whose hosts hold no ranks (``drains``)
    ... no more     -> workers that wait for nobody go on: a migration without moves (``resync``)
    a drain is open -> move the host's slots; finish the request when its processes are confirmed gone (``drains``)
    else            -> tell the agents what changed for them

``decide`` is pure and level-triggered: it may be repeated by anybody at any time. The only memory is ``Timers``, durations on the
coordinator's own clock, and losing it costs time, never safety. May not know: stores, threads, who executes the transaction.
"""

from __future__ import annotations

from dataclasses import replace

from tmrun.core import drains, failures, hang, losses, planner, policy, preemption, restarts, resync, shortage, transactions, watchdog
from tmrun.core import migration as judging
from tmrun.core.decision import Decision, Timers, ending
from tmrun.core.membership import Job
from tmrun.core.model import FENCED_SHARE, JobState, Kind, Notice, RankMap, Seat, Spec
from tmrun.core.plural import many
from tmrun.core.ranklist import ranks_named


def observe(timers: Timers, job: Job, now: float) -> Timers:
    """Start and stop the timers that ``decide`` asks for."""
    going = set()
    if job.spec and job.map is None and len(job.members) >= job.spec.nnodes:
        going.add("enough")
    if job.open_migration:
        going.add(f"migration {job.open_migration.id}")
        if any(v.value.workers for v in job.votes.values()):
            going.add(f"parked {job.open_migration.id}")
    going |= {f"left {h} {x.incarnation}" for h, x in job.leaving.items() if not job.alive(Seat(h, x.incarnation))}
    if job.map:
        going |= {f"gone {i} {job.map.seats[i].incarnation}" for i in job.gone}
        if losses.mass_loss(job, timers, now):
            going.add("suspect")
        going |= {f"taking over {job.epoch}", *_undisturbed(job)}
        if any(losses.echoes(job, i) for i in job.troubles):
            going.add(f"echo {job.epoch}")
        if job.open_doubts():
            going.add(f"doubt {job.epoch}")
        stuck = hang.finding(job)
        if stuck is not None and stuck.blame is watchdog.Blame.NOBODY:
            going.add(f"deadlock {job.epoch}")
    going |= {f"rests {h} {policy.strikes(job.maps, h)}" for h in policy.lemons(job.maps) if h in job.members}
    going |= {drains.asked(op) for op in job.open_ops() if op.force_after_s}
    going |= {drains.shut_down(op) for op in job.open_ops() if op.shutdown}
    began = dict.fromkeys(going, now) | shortage.begun(job, now, restarts=_restart_lacks(job, timers, now))
    return Timers({what: timers.seen.get(what, at) for what, at in began.items()})


def _restart_lacks(job: Job, timers: Timers, now: float) -> bool:
    """Nobody has failed, all workers are to start anew, and nodes are missing for that: those that are drained, or done and gone."""
    if job.spec is None or job.map is None or job.open_migration is not None or losses.failed(job):
        return False
    if not (job.gone or any(a.draining for a in job.admins.values())):
        return False  # who lives keeps its ranks
    wanted = resync.decide(job, job.spec, job.map, timers, now)
    return wanted is not None and wanted.lacking


def _undisturbed(job: Job) -> set[str]:
    """A timer for as long as all workers train, or at least run."""
    assert job.map is not None
    if job.open_migration is not None or losses.failed(job):
        return set()
    whole = len(job.runs) == len(job.map.seats)
    return {f"trains {job.map.generation}"} if job.movable else {f"runs {job.map.generation}"} if whole else set()


def decide(job: Job, timers: Timers, now: float) -> Decision:
    """The coordinator's next transaction. ``job.leader`` is me; ``now`` in seconds of the clock of ``observe``."""
    decision = _decide(job, timers, now)
    return decision if decision.txn is not None else _tell(job, decision, timers, now)


def _tell(job: Job, decision: Decision, timers: Timers, now: float) -> Decision:
    """Nothing else to do: let the agents know what changed for them. While a migration is open nobody needs to."""
    if job.spec is None or job.end is not None or job.open_migration is not None:
        return decision
    short_s = shortage.to_tell(job, timers, now)
    told = _of_workers(job, job.map, timers, now) if job.map is not None else Notice(0)
    notice = replace(told, epoch=job.epoch if short_s else told.epoch, short_s=short_s)
    if notice == job.told:
        return decision
    return Decision(transactions.tell(job, notice), decision.reason)


def _of_workers(job: Job, current: RankMap, timers: Timers, now: float) -> Notice:
    failed = tuple(losses.failed(job))
    movable = job.movable or job.told.movable  # claims go and come back with a lease
    trained, ran = (timers.since(f"{what} {current.generation}", now) for what in ("trains", "runs"))
    lasted = job.told.lasted or trained >= restarts.LASTED_S or ran >= restarts.LASTED_PLAIN_S
    return Notice(current.generation, movable, bool(job.done), job.epoch if failed else 0, failed, lasted)


def _decide(job: Job, timers: Timers, now: float) -> Decision:
    if job.spec is None or job.end is not None:
        return Decision(None, "the job has ended" if job.end else "no job yet")
    if preemption.abandoned(job):
        end = preemption.ABANDONED
        return ending(job, end.state, end.exit_code, end.reason)
    if job.map is None:
        return _rendezvous(job, job.spec, timers, now)
    urgent = drains.force(job, timers, now) or _hang(job, timers, now)
    if urgent is not None:
        return urgent
    if job.open_migration:
        return _migrate(job, timers, now)
    for rule in (_all_done, failures.decide, resync.decide, drains.decide):
        decision = rule(job, job.spec, job.map, timers, now)
        if decision is not None:
            return decision if decision.txn is not None else drains.carried_out(job, job.spec, job.map, timers, now) or decision
    return Decision(None, "steady")


def _rendezvous(job: Job, spec: Spec, timers: Timers, now: float) -> Decision:
    seats = planner.first_seats(job)
    lacking = missing(job, spec, timers, now)
    if len(seats) < spec.nnodes and shortage.over(job, timers, now):
        here = f"only {len(seats)} of {many(spec.nnodes, 'node')} came within {spec.node_wait_s:.0f} s"
        return ending(job, JobState.FAILED, 1, f"{here}; {shortage.missing(job, seats)}")
    if lacking:
        return Decision(None, lacking)
    txn = transactions.start(job, seats, Kind.INITIAL, "launch")
    return Decision(txn, "enough nodes", "epoch 1: " + _seats_text(job.spec, seats))


def missing(job: Job, spec: Spec, timers: Timers, now: float) -> str:
    """Who is waited for before the first start; empty: nobody."""
    here = len(planner.first_seats(job))
    if here < spec.nnodes:
        return f"waiting for nodes: {here} of {spec.nnodes} here"
    waited = timers.since("enough", now)
    if len(job.members) < spec.nnodes + spec.standby and waited < spec.join_wait_s and not shortage.over(job, timers, now):
        return f"waiting {spec.join_wait_s - waited:.0f} s more for standbys"
    return ""


def _seats_text(spec: Spec | None, seats: tuple[Seat, ...]) -> str:
    assert spec is not None
    return ", ".join(f"{s.host} {ranks_named(spec.ranks(i))}" for i, s in enumerate(seats))


def _migrate(job: Job, timers: Timers, now: float) -> Decision:
    current = job.open_migration
    assert current is not None and job.spec is not None
    verdict = judging.judge(job, current, timers.since(f"migration {current.id}", now))
    if isinstance(verdict, judging.Wait):
        return Decision(None, verdict.reason)
    if isinstance(verdict, judging.Abort):
        return Decision(transactions.abort(job, verdict.reason), verdict.reason, f"migration {current.id} aborted: {verdict.reason}")
    doubt = [m.slot for m in current.moves if current.kind is Kind.FAILURE and not losses.confirmed(job, m.slot)]
    if doubt and idle_s(job) + timers.since(f"parked {current.id}", now) < job.spec.lease_ttl_s * FENCED_SHARE:
        return Decision(None, f"{losses.what(job, doubt[0])}: presumed dead; its agent, if it lives, is ending workers that were cut off")
    txn = transactions.commit(job, verdict.resume)
    kept = judging.stayers(job.spec, current)
    say = f"committed epoch {job.epoch + 1} at step {verdict.resume.target}; stayers kept: {kept}"
    return Decision(txn, "all votes are in", say)


def idle_s(job: Job) -> float:
    """For how long some stayer had entered no vote when it answered."""
    return max((w.idle_s for v in job.votes.values() for w in v.value.workers), default=0.0)


def _hang(job: Job, timers: Timers, now: float) -> Decision | None:
    """Some ranks keep all others waiting: their nodes have to end them, whatever else goes on. What then follows is a failure's."""
    current = job.open_migration
    found = hang.unstopped(job, timers.since(f"migration {current.id}", now)) if current is not None else None
    found = found or hang.finding(job)
    orders = hang.orders(job, found) if found is not None and not job.pause else ()
    if found is None or not orders:
        return None
    hosts = ", ".join(f"{o.host} rank {o.rank}" for o in orders)
    acts = "its workers are ended" if all(o.act for o in orders) else "nothing is done yet"
    return Decision(transactions.evict(job, orders), found.why, f"hang: {found.why}; {hosts} is to blame: {acts}")


def _all_done(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    if len(job.done) < len(current.seats):
        return None
    return ending(job, JobState.SUCCEEDED, 0, "all workers finished")
