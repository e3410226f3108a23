"""What a successor is given, by whom, and how it takes it on.

    drain     the leaver sends everything, exactly as of the stop step, and goes once the joiner confirmed it
    failure   a *source* (a replica) sends its own objects and, with other replicas, tensors, as of the start of ``target``; a *witness* of
              the lost rank sends what that rank itself said in the vote of target - 1: random state, data position. The joiner is a witness
              itself from now on: its wards send it what they said in that vote

    rollback  a failure in which a shard was lost that has no replica: stayers go back to their own snapshots, a partner sends the lost one

An object whose state was equal on source and lost rank when both last voted (a scheduler) is a replica, and the source's is newer;
any other is the lost rank's own. May not know: how a migration was agreed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed.distributed_c10d as c10d

from tmrun import wire
from tmrun.core.errors import WorkerError
from tmrun.core.plural import many
from tmrun.worker import rng, transfer
from tmrun.worker.board import Pending
from tmrun.worker.comm import Backend
from tmrun.worker.process import SETTLED_STEPS, Counters, Process
from tmrun.worker.state import objects_of, random_of
from tmrun.worker.transfer import Direct

MOST_SOURCES = 4
"""Live replicas that send to one joiner at the same time."""


def give_all(process: Process, backend: Backend, direct: Direct, step: int) -> None:
    """A leaver's last duty; returns when the joiner has everything."""
    witnessed = {rank: process.ledger.said(rank, step - 1) for rank in (process.rank, *process.wards)}
    tree = {**_everything(process, step), "witnessed": witnessed}
    _, digest = transfer.send_source(backend, 1, process.state, tree, transfer.STALL, direct=direct)
    transfer.await_acknowledgement(backend, 1, digest)


def take_all(process: Process, backend: Backend, direct: Direct) -> int:
    """The joiner's side of ``give_all``. Returns bytes received."""
    process.state.forget_gathers()
    tree, received, digest = transfer.receive_source(backend, 0, process.state, transfer.STALL, process.tell_transfer, direct)
    process.state.put_objects(tree["objects"])
    rng.restore(rng.decode(tree["rng"]))
    _adopt(process, tree, since_reset=SETTLED_STEPS)
    transfer.acknowledge(backend, 0, digest)  # last: the leaver goes now
    for rank, needs in tree["witnessed"].items():
        process.ledger.witness(rank, tree["step"] - 1, needs)
    return received


def feed(process: Process, pending: Pending, commit: wire.Commit) -> int:
    """Send what we owe to a failure's joiners. One that is gone again is the next failure's business, and takes nothing from the others.

    Returns bytes sent.
    """
    sent = 0
    for joiner in sorted(pending.prepare.ranks):
        with _others_go_on(process):
            sent += _send_copy(process, commit, joiner) if commit.rollback else _send_part(process, pending, commit, joiner)
    if not commit.rollback:
        _tell_new_witnesses(process, pending.prepare.ranks, commit.target - 1)
    return sent


@contextlib.contextmanager
def _others_go_on(process: Process) -> Iterator[None]:
    """A lost peer is remembered, and what does not need it goes on."""
    try:
        yield
    except RuntimeError as error:
        if not process.is_communication(error):
            raise
        process.note_trouble(error)


def _control(process: Process) -> Backend:
    control = process.live.control
    assert control is not None
    return control.backend


def _send_copy(process: Process, commit: wire.Commit, joiner: int) -> int:
    source, _ = _origins(commit, joiner)
    if source != process.rank:
        return 0
    return transfer.send_parcel(_control(process), joiner, process.snapshots.copy_of(joiner, commit.target), _agreed(process))[0]


def _send_part(process: Process, pending: Pending, commit: wire.Commit, joiner: int) -> int:
    backend, direct, voted, sent = _control(process), process.live.direct, commit.target - 1, 0
    source, witness = _origins(commit, joiner)
    sources = _sources(process, joiner, source, pending.prepare.ranks)
    if source == process.rank:
        own = objects_of(process.ledger.said(process.rank, voted))
        tree = {**_common(process, commit.target), "objects": process.state.encoded_objects(), "voted": own}
        sent += transfer.send_source(backend, joiner, process.state, tree, sources=sources, direct=direct)[0]
    elif process.rank in sources:
        sent += transfer.send_share(backend, joiner, process.state, len(sources), sources.index(process.rank), direct)
    if witness == process.rank:
        sent += transfer.send_needs(backend, joiner, process.ledger.said(joiner, voted))
    return sent


def _sources(process: Process, joiner: int, first: int, moved: tuple[int, ...]) -> tuple[int, ...]:
    """Who sends a part of the joiner's tensors: the same answer on all stayers, for all know all signatures."""
    stayers = tuple(r for r in range(process.world) if r not in moved)
    others = [r for r in process.ledger.replicas(joiner, stayers) if r != first]
    most = 1 if process.live.direct else MOST_SOURCES  # a device takes one part after the other anyway
    return (first, *others[: most - 1])


def be_fed(process: Process, pending: Pending, commit: wire.Commit) -> int:
    """The joiner's side of ``feed``. A ward that is gone again costs what it said, not us. Returns bytes received."""
    process.state.forget_gathers()
    backend = _control(process)
    source, witness = _origins(commit, process.rank)
    tree, received, _ = transfer.receive_source(backend, source, process.state, told=process.tell_transfer, direct=process.live.direct)
    _adopt(process, tree, since_reset=0)
    if commit.rollback:
        process.state.put_objects(tree["objects"])
        rng.restore(rng.decode(tree["rng"]))
        return received
    needs, voted = transfer.receive_needs(backend, witness), commit.target - 1
    process.state.put_objects(merge(tree["objects"], tree["voted"], objects_of(needs)))
    rng.restore(rng.decode(random_of(needs)))
    process.ledger.witness(process.rank, voted, needs)
    _tell_new_witnesses(process, pending.prepare.ranks, voted)
    for ward in sorted(process.wards, key=lambda ward: (ward in pending.prepare.ranks, ward)):  # another joiner is fed later, perhaps
        with _others_go_on(process):
            process.ledger.witness(ward, voted, transfer.receive_witnessed(backend, ward))
    return received


def _tell_new_witnesses(process: Process, moved: tuple[int, ...], voted: int) -> None:
    """Joiners among our witnesses hold nothing of us yet. Nobody waits for it: one that does not receive it is lost itself."""
    own = process.ledger.said(process.rank, voted)
    process.under_way = []
    for witness in (w for w in process.witnesses if w in moved):
        with _others_go_on(process):
            process.under_way.append(transfer.send_witnessed(_control(process), witness, own))


def take_snapshot(process: Process, step: int) -> None:
    """Copy this rank's state at the boundary before ``step``."""
    process.state.forget_gathers()
    process.snapshots.take(scope(process), step, process.state, _everything(process, step))


def roll_back(process: Process, step: int) -> None:
    """A stayer's way back to its own copy."""
    process.state.forget_step()
    tree = transfer.unpack(process.state, process.snapshots.copy_of(process.rank, step))
    process.state.gradients.adopt(tree["gradients"])
    process.state.put_objects(tree["objects"])
    rng.restore(rng.decode(tree["rng"]))
    process.ledger.restarted()
    made = tree["group_count"]
    process.live.undo_groups(lambda name: not name.isdecimal() or int(name) < made, f"a step after {step - 1}")  # torch numbers them
    c10d._world.group_count = made


def restart_snapshots(process: Process, target: int) -> None:
    """After a switch: new connections, and a new snapshot at ``target`` if any are needed."""
    process.snapshots.switched(scope(process), target, process.ledger.signatures)


def scope(process: Process) -> str:
    """Where ranks of this epoch find each other's couriers."""
    return f"snapshot/{process.who.generation}/{process.who.epoch}"


def merge(newest: dict[str, bytes], voted: dict[str, bytes], own: dict[str, bytes]) -> dict[str, bytes]:
    """``newest`` and ``voted`` are the source's, now and in the vote; ``own`` is what the lost rank voted."""
    return {name: newest[name] if voted.get(name) == state else state for name, state in own.items()}


def _everything(process: Process, step: int) -> dict[str, Any]:
    return {**_common(process, step), "rng": rng.encode(rng.capture()), "objects": process.state.encoded_objects()}


def _common(process: Process, step: int) -> dict[str, Any]:
    lasting = process.state.gradients.lasting()
    return {"step": step, "group_count": c10d._world.group_count, "gradients": lasting, **_agreed(process)}


def _agreed(process: Process) -> dict[str, Any]:
    return {
        "total": process.total,
        "signatures": list(process.ledger.signatures),
        "untrained": process.state.untrained.found,
    }


def _adopt(process: Process, tree: dict[str, Any], *, since_reset: int) -> None:
    if tree["total"] != process.total:
        raise WorkerError(f"the running job plans {many(tree['total'], 'step')}, this script {process.total}; same script, same flags?")
    c10d._world.group_count = tree["group_count"]
    process.ledger.adopt(process.rank, tuple(tree["signatures"]))
    process.state.untrained.adopt(tree["untrained"])
    process.state.gradients.adopt(tree["gradients"])
    process.counters = Counters(SETTLED_STEPS, since_reset)


def _origins(commit: wire.Commit, joiner: int) -> tuple[int, int]:
    source = commit.sources[joiner]
    return source, commit.witness.get(joiner, source)
