"""Rules for slots that failed: the program's own error, a breaker, a standby that takes over, a wait for one. May not know: drains."""

from __future__ import annotations

from tmrun.core import attempts, losses, planner, policy, restarts, shortage, transactions
from tmrun.core.decision import DOUBT_SHARE, Decision, Timers, ending
from tmrun.core.membership import Job
from tmrun.core.model import JobState, Kind, RankMap, Spec

RETURNS_S = 30.0
"""A lost host may be back by then, and take over with everybody's state as it is; all start anew on one that cannot only later."""


def decide(job: Job, spec: Spec, current: RankMap, timers: Timers, now: float) -> Decision | None:
    """What to do about the slots that failed; None: none did."""
    failed = losses.failed(job)
    if not failed:
        return None
    if job.done:
        return ending(job, JobState.FAILED, losses.exit_code(job, failed), f"{losses.what(job, failed[0])} after others had finished")
    if job.pause:
        return Decision(None, f"{losses.what(job, failed[0])}; {losses.held_back(job)}")
    failed.sort(key=lambda i: losses.echoes(job, i))  # the cause is told first
    blamed = _blame_program(job, spec, failed, timers, now)
    if blamed is not None:
        return blamed
    early = _too_early(job, failed, timers, now)
    if early:
        return Decision(None, early)
    if attempts.immovable(job):
        return restarts.after_loss(job, current, failed, f"{losses.what(job, failed[0])}; {attempts.immovable(job)}", timers, now)
    verdict = policy.judge(job.maps, [t for t in map(job.trouble, failed) if t is not None])
    if verdict.action is policy.Action.GIVE_UP:
        return restarts.restart(job, verdict.why, losses.exit_code(job, failed), timers, now, program=True)
    late = losses.taking_over(job)
    if late and timers.since(f"taking over {current.epoch}", now) < spec.prepare_deadline_s:
        return Decision(None, f"{losses.what(job, failed[0])}; {late[0].joiner.host} is still taking over")
    return replace(job, spec, current, failed, timers, now)


def _too_early(job: Job, failed: list[int], timers: Timers, now: float) -> str:
    """Why nothing is decided yet; empty: go on."""
    frozen = losses.breaker(job, timers, now)
    if frozen:
        return frozen
    held = [i for i in failed if i in job.runs]
    if held:
        return f"slot {held[0]} is still claimed by {job.runs[held[0]].value.host}"
    back = attempts.returning(job)
    return f"{losses.what(job, failed[0])}; {back}" if back else ""


def _blame_program(job: Job, spec: Spec, failed: list[int], timers: Timers, now: float) -> Decision | None:
    """Some program failed by itself. Those that only lost a peer wait for what happened to it, and are to blame if nothing did."""
    software = [job.troubles[i] for i in failed if job.trouble(i) and job.troubles[i].software]
    own = [t for t in software if not t.echo]
    if own:
        return restarts.program_error(job, own[0], timers, now)
    if len(software) < len(failed):
        return None
    left = DOUBT_SHARE * spec.lease_ttl_s - timers.since(f"echo {job.epoch}", now)
    if left > 0:
        return Decision(None, f"{losses.what(job, failed[0])}; waiting {left:.0f} s more for what happened to its peer")
    return restarts.program_error(job, software[0], timers, now)


def replace(job: Job, spec: Spec, current: RankMap, failed: list[int], timers: Timers, now: float) -> Decision:
    """Standbys for all of them, in one migration."""
    if len(failed) > planner.MAX_MOVES:
        reason = f"{len(failed)} nodes were lost at once, more than one migration can move"
        return restarts.after_loss(job, current, failed, reason, timers, now)
    plan = planner.plan_moves(job, failed, resting=losses.resting(job, timers, now))
    if not plan.short:
        reason = "; ".join(losses.what(job, i) for i in failed)
        txn = transactions.propose(job, Kind.FAILURE, plan.moves, "", reason)
        unsaid = [losses.what(job, i) for i in failed if not job.trouble(i)]
        return Decision(txn, reason, "; ".join([*unsaid, f"plan: {attempts.plan_text(job, plan)}"]))
    able, unable = planner.standbys(job, warm_only=False), planner.unable(job)
    enough = len(able) < len(failed) <= len(able) + len(unable) and len(planner.first_seats(job)) == spec.nnodes
    if enough and timers.since(shortage.timer(job), now) > min(RETURNS_S, spec.node_wait_s / 2):
        reason = f"{losses.what(job, failed[0])}; {unable[0].host} cannot take over: {unable[0].fault}"
        return restarts.after_loss(job, current, failed, reason, timers, now)
    if shortage.over(job, timers, now) and len(able) < len(failed):
        return ending(
            job,
            JobState.FAILED,
            losses.exit_code(job, failed),
            f"{losses.what(job, failed[0])}; no standby within {spec.node_wait_s:.0f} s",
        )
    return Decision(None, f"{losses.what(job, failed[0])}; {plan.why}")
