"""What an operator should look at: coded conditions of a job, each with how bad it is, what was found and what to do about it.

The codes are stable; all of them, with what to do, are in ``WHAT_TO_DO``. May not know: how they are printed, clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tmrun.core import foresight, hang, losses, planner, progress, straggler
from tmrun.core import migration as judging
from tmrun.core.checks import Grade
from tmrun.core.decision import Timers
from tmrun.core.heard import Heard
from tmrun.core.membership import Job
from tmrun.core.model import JobState, NodeState, Operation
from tmrun.core.plural import many, some
from tmrun.core.states import job_state, known_hosts, node_state

WHAT_TO_DO: dict[str, tuple[Grade, str]] = {
    "STORE_LOST": (Grade.BAD, "training goes on while its steps do, but nobody can be replaced; `tmrun doctor` looks at each etcd"),
    "STORE_SUSPECT": (Grade.BAD, "look at the store and the network; `tmrun replace NODE` confirms a death"),
    "NO_COORDINATOR": (Grade.BAD, "wait a lease time; if it stays, `tmrun doctor` looks at the store"),
    "EPOCH_STUCK": (
        Grade.BAD,
        "`tmrun logs NODE` there; `tmrun replace NODE` takes it out, `tmrun drain --cancel` takes a drain back",
    ),
    "HANG": (Grade.BAD, "the stacks of all threads are in the launchers' output; `tmrun replace NODE` does not wait"),
    "NODE_SUSPECT": (
        Grade.WARN,
        "replaced when it must have ended its workers; at once by `tmrun replace NODE`, if it is surely off",
    ),
    "NO_PROGRESS": (Grade.WARN, "`tmrun top`, `tmrun logs NODE`; the next one may be long, else `tmrun replace NODE` takes one out"),
    "STANDBY_LOW": (Grade.WARN, "start another host with the same command, or `tmrun undrain` one"),
    "STANDBY_COLD": (Grade.WARN, "wait; `tmrun nodes` says what it does"),
    "STORE_SLOW": (
        Grade.WARN,
        "look at its disk, CPU and network, `tmrun doctor`; a migration waits for ten answers in a row",
    ),
    "DRAIN_STUCK": (
        Grade.WARN,
        "start a host, wait for one to be warm, or `tmrun drain --cancel NODE`; a script without run.steps needs `tmrun replace NODE`",
    ),
    "NODE_SLOW": (Grade.WARN, "look at its clocks and heat; `tmrun drain NODE`, or launch with --straggler drain"),
    "VERSION_SKEW": (Grade.WARN, "upgrade them, one by one: `tmrun drain NODE`, then start it again"),
    "PAUSED": (Grade.WARN, "`tmrun resume` when done"),
}
"""code -> (how bad, what to do), the worst first: the order in which they are shown."""

SLOW_S = 0.2
"""An answer of the store that takes longer is slow. It is measured beside a running job, so it is above what ``doctor`` calls slow."""
FAST_S = 0.1
"""What was slow is so until answers are as quick as this."""
STILL_S = 60.0
STILL_STEPS = 20
"""So many usual steps, and a minute, without one."""
STUCK_S = 30.0
"""A migration that takes longer is worth a look, if no lease is being waited for ..."""
STUCK_SHARE = 2.0
"""... which takes 1.2 lease times."""


Found = Iterator[tuple[str, str]]
"""(code, what was found)."""


def of(job: Job, heard: Heard | None = None) -> list[dict[str, Any]]:
    """All conditions of a job, the worst first; empty when it is healthy, or over."""
    if job.end is not None:
        return []
    heard = heard or Heard()
    rules = (
        _standbys(job),
        _vanished(job),
        _store(job, heard),
        _migration(job, heard),
        _requests(job),
        _people(job),
        _slow(job, heard),
        _still(job, heard),
    )
    found = [condition(code, text) for rule in rules for code, text in rule]
    return sorted(found, key=lambda c: list(WHAT_TO_DO).index(c["code"]))


def condition(code: str, text: str) -> dict[str, Any]:
    """One of them, as people and JSON have it."""
    grade, advice = WHAT_TO_DO[code]
    return {"code": code, "grade": grade.value, "text": text, "advice": advice}


def _standbys(job: Job) -> Found:
    if job.spec is None or job.map is None:
        return
    states = [node_state(job, h)[0] for h in known_hosts(job) if not job.cordoned(h)]
    warm, wanted = states.count(NodeState.STANDBY), job.spec.standby
    if warm + states.count(NodeState.WARMING) < wanted:
        yield "STANDBY_LOW", f"standbys: {warm} of {wanted}"
    elif warm < wanted:
        yield "STANDBY_COLD", f"warm standbys: {warm} of {wanted}"


def _vanished(job: Job) -> Found:
    gone = losses.vanished(job)
    if job.spec is None or job.map is None or not gone:
        return
    if len(gone) >= losses.breaker_limit(job.spec):
        yield "STORE_SUSPECT", f"{len(gone)} of {many(job.spec.nnodes, 'node')} are gone and nobody confirms their deaths"
    else:
        yield "NODE_SUSPECT", f"nobody confirms that it is dead, but its lease is gone: {some([job.map.seats[i].host for i in gone])}"


def _store(job: Job, heard: Heard) -> Found:
    if job.leader is None and job.map is not None:
        yield "NO_COORDINATOR", "no agent coordinates at the moment"
    if heard.answer_s > SLOW_S:
        yield "STORE_SLOW", f"its quickest answer to this command took {heard.answer_s:.2f} s"
    slow = [x for x in heard.lags if x.seconds and x.host in job.members and job.members[x.host].value.incarnation == x.incarnation]
    if slow:
        most = max(x.seconds for x in slow)
        yield "STORE_SLOW", f"answers take up to {most:.2f} s at {some(sorted(x.host for x in slow))}"


def _migration(job: Job, heard: Heard) -> Found:
    if job.spec is None or job.map is None:
        return
    current, bound = job.open_migration, stuck_after_s(job)
    if current is not None and current.id == heard.overdue:
        missing = judging.missing(job, current)
        lacks = f"no vote of {some(missing)}" if missing else "all votes are in, but it is not committed"
        yield "EPOCH_STUCK", f"migration {current.id} to epoch {current.base_epoch + 1} is open for more than {bound:.0f} s: {lacks}"
    elif current is None and job.map.migration and job.map.migration == heard.overdue:
        late = [f"{m.joiner.host} (slot {m.slot})" for m in losses.taking_over(job)]
        if late:
            yield "EPOCH_STUCK", f"epoch {job.epoch} was committed more than {bound:.0f} s ago, and who has not taken over is {some(late)}"


def stuck_after_s(job: Job) -> float:
    """A migration that takes longer is stuck."""
    return max(STUCK_S, STUCK_SHARE * job.spec.lease_ttl_s) if job.spec else STUCK_S


def overdue(job: Job, timers: Timers, now: float) -> int:
    """The migration that is stuck by the coordinator's clock (its timers): open, or committed and not taken over. 0: none."""
    if job.open_migration is not None:
        number = job.open_migration.id
        return number if timers.since(f"migration {number}", now) > stuck_after_s(job) else 0
    if job.map is None or not losses.taking_over(job) or timers.since(f"taking over {job.epoch}", now) <= stuck_after_s(job):
        return 0
    return job.map.migration


def lag(known_s: float, answer_s: float) -> float:
    """What an agent should have told of the store's answers, 0: they are quick. ``known_s``: what it has told. Changes are rare."""
    if answer_s > SLOW_S:
        return known_s if known_s and 0.5 < answer_s / known_s < 2 else round(answer_s, 3)
    return known_s if answer_s > FAST_S else 0.0


def _requests(job: Job) -> Found:
    if job.map is None or job.open_migration is not None or job.pause is not None:
        return
    for op in job.open_ops():
        if op.verb == "drain" and _waits(job, op):
            what = f"{op.to or 'a standby'} to be warm and free" if foresight.movable(job) else "the workers to reach run.steps"
            yield "DRAIN_STUCK", f"drain {op.id} of {some(op.hosts)} waits for {what}"


def _waits(job: Job, op: Operation) -> bool:
    """Somebody has to leave, and cannot, or nobody could take over."""
    free = [m for m in planner.standbys(job) if not op.to or m.host == op.to]
    return job.map is not None and not (free and foresight.movable(job)) and any(job.map.slot_of_host(h) is not None for h in op.hosts)


def _people(job: Job) -> Found:
    versions: dict[str, list[str]] = {}
    for host, member in sorted(job.members.items()):
        versions.setdefault(member.value.version, []).append(host)
    if len(versions) > 1:
        told = "; ".join(f"{version}: {some(hosts)}" for version, hosts in sorted(versions.items()))
        yield "VERSION_SKEW", f"nodes run different versions of tmrun ({told})"
    if job.pause is not None:
        yield "PAUSED", losses.paused(job.pause)
    stuck = hang.finding(job)
    if stuck is not None:
        yield "HANG", stuck.why


def _slow(job: Job, heard: Heard) -> Found:
    """Seated nodes that compute longer than the others, by the latest measurements."""
    if job.spec is None or job.spec.straggler == "off":
        return
    busy = {host: told.busy_s for host, told in progress.of_seats(job, heard.progress).items()}
    for host, ratio in straggler.ratios(busy).items():
        yield "NODE_SLOW", f"{host} computes {ratio:.2f} times as long as the others"


def _still(job: Job, heard: Heard) -> Found:
    """Nobody has begun a step for long, whoever looks for hangs. By wall clocks, as ages are."""
    told = progress.of_seats(job, heard.progress).values()
    if not told or not heard.now or not all(p.time for p in told) or job.done or job_state(job)[0] is not JobState.RUNNING:
        return
    age_s, usual_s = heard.now - max(p.time for p in told), max(p.step_s for p in told)
    if age_s > max(STILL_S, STILL_STEPS * usual_s):
        yield "NO_PROGRESS", f"no step has begun for {age_s:.0f} s, by the clocks of the nodes and of this host; usual are {usual_s:.2f} s"
