"""What people call the state of a job and of its nodes, and why. Nothing is decided by it. May not know: how it is shown."""

from __future__ import annotations

from tmrun.core import admission, attempts, coordinator, failures, losses, planner
from tmrun.core.decision import Timers
from tmrun.core.membership import Job, fitness, natural
from tmrun.core.model import Host, JobState, Member, NodeState


def job_state(job: Job) -> tuple[JobState, str]:
    """(state, why) for people."""
    if job.end:
        return job.end.state, job.end.reason
    if job.map is None or job.spec is None:
        return JobState.RENDEZVOUS, (coordinator.missing(job, job.spec, Timers(), 0) or "all nodes are here") if job.spec else "no job yet"
    failed = losses.failed(job)
    if job.pause and not job.open_migration:
        return JobState.PAUSED, "; ".join([*(losses.what(job, i) for i in failed), losses.held_back(job)])
    if job.open_migration:
        return (
            JobState.RECOVERING if failed else JobState.MIGRATING
        ), f"migration {job.open_migration.id} ({job.open_migration.kind.value})"
    if failed and not planner.standbys(job):
        return JobState.WAITING, failures.replace(job, job.spec, job.map, failed, Timers(), 0).reason
    if failed:
        return JobState.RECOVERING, losses.what(job, failed[0])
    parked = attempts.parked(job)
    if parked:
        return JobState.RECOVERING, f"migration {parked.id} was aborted: {parked.reason}"
    return JobState.RUNNING, ""


def final_exit_code(state: JobState, code: int) -> int:
    """What a launcher returns for a job that ended so."""
    return 0 if state is JobState.SUCCEEDED else code or 1


def known_hosts(job: Job) -> list[Host]:
    """Every host that is registered, seated or under an operator's order, in natural order."""
    hosts = set(job.members) | set(job.admins)
    if job.map:
        hosts |= {s.host for s in job.map.seats}
    return sorted(hosts, key=natural)


def node_state(job: Job, host: Host) -> tuple[NodeState, str]:
    """(state, why) of one node: the states partition the nodes."""
    member = job.members.get(host)
    slot = job.map.slot_of_host(host) if job.map else None
    admin = job.admins.get(host)
    if slot is not None:
        return _seated_state(job, host, slot)
    if admin is not None and admin.draining:
        why = admin.reason or "drained"
        return (NodeState.DRAINING if job.runs_on(host) else NodeState.DRAINED), why
    if member is None:
        return NodeState.DOWN, "not registered"
    if member.value.fault:
        return NodeState.FAILED, member.value.fault
    if job.map is None:
        return NodeState.JOINING, "waiting for the first map"
    if member.value.warm:
        return _standby_state(job, member.value)
    return NodeState.WARMING, "rehearsing" if job.movable else "rehearses once the workers have reached run.steps"


def _standby_state(job: Job, member: Member) -> tuple[NodeState, str]:
    verdict = fitness(job, member)
    if verdict.fit is admission.Fit.REFUSED:
        return NodeState.FAILED, f"not fit as a standby: {verdict.why}"
    return NodeState.STANDBY, f"warm, but chosen last: {verdict.why}" if verdict.why else "warm"


def _seated_state(job: Job, host: Host, slot: int) -> tuple[NodeState, str]:
    assert job.map is not None
    seat = job.map.seats[slot]
    trouble = job.trouble(slot)
    if not job.alive(seat):
        dead = losses.confirmed(job, slot)
        return (NodeState.DOWN, "its lease is gone") if dead else (NodeState.SUSPECT, "its lease is gone; nobody confirms that it is dead")
    if trouble:
        return NodeState.FAILED, trouble.text
    admin = job.admins.get(host)
    if admin is not None and admin.draining:
        return NodeState.DRAINING, admin.reason
    return NodeState.ACTIVE, ""
