"""What a process says in step votes, and what earlier votes told it: the ledger.

The *signature* of a rank's shard is exchanged before the first three votes and kept: ranks with equal signatures hold replicas of each
other. The *blob* is what only this rank knows, as named parts; a witness is sent the parts that changed since the last vote over
the same connections, and everything in the first vote over new ones. Of every ward, and of this rank, the blobs of the last two votes
are kept; ``vote`` says why two are needed and enough.
May not know: migrations, how votes are held.
"""

from __future__ import annotations

from collections.abc import Iterable

from tmrun.core.errors import WorkerError
from tmrun.worker import values, vote
from tmrun.worker.comm import Communicator
from tmrun.worker.state import Needs, State

_SIGNED_VOTES = 3
_KEPT = 2


class Ledger:
    """Votes cast and votes passed."""

    def __init__(self) -> None:
        self.signatures: tuple[bytes, ...] = ()
        self._poll: vote.Poll | None = None
        self._signed = 0
        self._blobs: dict[int, dict[int, Needs]] = {}
        """rank -> step -> what it said in that step's vote: our own, and our wards'."""

    def vote(self, control: Communicator, place: tuple[int, int], state: State, ballot: vote.Ballot) -> vote.Tally:
        """Vote as (rank, ranks a node). Raises RuntimeError when the vote is lost here, WorkerError when ranks contradict each other."""
        rank, local_world = place
        if self._signed < _SIGNED_VOTES:
            self.signatures = vote.exchange_signatures(control.backend, state.signature())
        assert control.wires is not None
        fresh = self._poll is None or self._poll.wires is not control.wires
        if self._poll is None or fresh:
            self._poll = vote.Poll(control.wires, rank, control.backend.size(), local_world)
        mine = state.needs()
        before = {} if fresh else self._newest(rank)
        self.witness(rank, ballot.step, mine)
        bases = {} if fresh else {ward: self._newest(ward) for ward in self._blobs}
        tally = self._poll.vote(
            ballot, _changes(before, mine), lambda ward, blob: self.witness(ward, ballot.step, _apply(bases.get(ward, {}), blob))
        )
        self._signed += 1
        return tally

    def passed_unseen(self) -> None:
        """A vote passed, but its result did not reach us."""
        self._signed += 1

    def witness(self, rank: int, step: int, needs: Needs) -> None:
        """Keep what a rank needs to go on after ``step``."""
        kept = self._blobs.setdefault(rank, {})
        kept.pop(step, None)
        kept[step] = needs
        for old in list(kept)[:-_KEPT]:
            del kept[old]

    def switched(self) -> None:
        """The connections are about to be replaced: let go of them."""
        self._poll = None

    def restarted(self) -> None:
        """Everybody went back to an earlier step: what was said since does not count."""
        self._blobs.clear()

    def adopt(self, rank: int, signatures: tuple[bytes, ...]) -> None:
        """Continue as ``rank``, with what its job agreed on."""
        self.signatures, self._signed = signatures, _SIGNED_VOTES
        self._blobs.clear()

    def replicas(self, rank: int, of: tuple[int, ...]) -> tuple[int, ...]:
        """Which of these ranks hold what ``rank`` holds."""
        return tuple(r for r in of if self.signatures and self.signatures[r] == self.signatures[rank])

    def witnessed(self, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Step -> which of these ranks' blobs of that step's vote are kept here."""
        steps = sorted({step for rank in ranks for step in self._blobs.get(rank, ())})
        return {step: tuple(r for r in ranks if step in self._blobs.get(r, ())) for step in steps}

    def said(self, rank: int, step: int) -> Needs:
        """What ``rank`` said in the vote of ``step``; only what ``witnessed`` named."""
        try:
            return self._blobs[rank][step]
        except KeyError:
            kept = sorted(self._blobs.get(rank, ()))
            raise WorkerError(f"asked for what rank {rank} said in the vote of step {step}; kept are {kept}") from None

    def _newest(self, rank: int) -> Needs:
        kept = self._blobs.get(rank, {})
        return kept[next(reversed(kept))] if kept else {}


def _changes(before: Needs, now: Needs) -> bytes:
    """The parts that differ; everything if the names do. The first byte says which."""
    whole = before.keys() != now.keys()
    return values.encode((whole, {name: part for name, part in now.items() if whole or part != before[name]}))


def _apply(before: Needs, changes: bytes) -> Needs:
    whole, parts = values.decode(changes)
    return parts if whole else {**before, **parts}
