"""What a process says in votes, and what earlier votes told it: the ledger.

The *signature* of a rank's shard is taken in the first three votes and kept: ranks with equal signatures hold replicas of each other.
The *blob* is what only this rank knows. After a crash the successor of a rank continues from the blob in the last vote that counted.
May not know: the control group, migrations.
"""

from __future__ import annotations

from tmrun.core.errors import WorkerError
from tmrun.worker import vote
from tmrun.worker.state import State

_SIGNED_VOTES = 3


class Ledger:
    """Votes cast and votes passed."""

    def __init__(self) -> None:
        self.voter = vote.Voter()
        self.signatures: tuple[bytes, ...] = ()
        self._last: vote.Result | None = None
        self._mine = b""
        self._signature = b""
        self._signed = 0

    def ballot(self, state: State, step: int, *, good: bool, ready: int, held: int = -1, every: int = 1) -> vote.Ballot:
        """Our ballot for this step."""
        if self._signed < _SIGNED_VOTES:
            self._signature = state.signature()
        self._mine = state.needs()
        return vote.Ballot(step, good, ready, self._signature, self._mine, held, every)

    def passed(self, result: vote.Result) -> None:
        """A vote passed, and we know what everybody said."""
        self._last = result
        self.signatures = tuple(b.signature for b in result.ballots)
        self._signed += 1

    def passed_unseen(self) -> None:
        """A vote passed, but its ballots did not reach us."""
        self._signed += 1

    def adopt(self, rank: int, signatures: tuple[bytes, ...], capacity: int) -> None:
        """Continue as ``rank``, with what its job agreed on."""
        self.voter.capacity = capacity
        self.signatures, self._signature, self._signed = signatures, signatures[rank], _SIGNED_VOTES

    def replicas(self, rank: int, of: tuple[int, ...]) -> tuple[int, ...]:
        """Which of these ranks hold what ``rank`` holds."""
        return tuple(r for r in of if self.signatures and self.signatures[r] == self.signatures[rank])

    def own_blob(self, rank: int, step: int) -> bytes:
        """What we said in the vote of ``step``; if that vote was lost to us, others have counted it all the same."""
        return self._last.ballots[rank].blob if self._last is not None and self._last.step == step else self._mine

    def blob_of(self, rank: int, step: int) -> bytes:
        """What ``rank`` said in the vote of ``step``."""
        if self._last is None or self._last.step != step:
            known = "none" if self._last is None else f"that of step {self._last.step}"
            raise WorkerError(f"asked for what rank {rank} voted in step {step}, but the last vote that passed here is {known}")
        return self._last.ballots[rank].blob
