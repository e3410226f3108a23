"""A machine that is about to go asks for its own drain, once, and takes it back when it stays."""

from __future__ import annotations

from test_core import KEYS, running, seat

from tmrun.core import codec, preemption
from tmrun.core.model import Admin, Host, Operation, OpState, Verb

ME = seat("a")


def asked(state: OpState = OpState.OPEN, op_id: str = "notice-a-a.1-0") -> list[tuple[str, object]]:
    op = Operation(op_id, Verb.DRAIN, (Host("a"),), "this machine goes away: spot", state=state)
    return [(KEYS.op(op_id), op), (KEYS.admin("a"), Admin(Host("a"), True, op.reason, op_id))]


def test_it_asks_once() -> None:
    txn = preemption.answer(running(), ME, "spot", 20.0)
    assert txn is not None
    (op,) = [codec.decode(Operation, o.value) for o in txn.ops if "/op/" in o.key]  # type: ignore[union-attr]
    assert (op.hosts, op.force_after_s, op.reason) == (("a",), 20.0, "this machine goes away: spot")
    assert preemption.answer(running(*asked()), ME, "spot", 20.0) is None


def test_it_takes_back_what_it_asked_for_and_nothing_else() -> None:
    assert preemption.answer(running(), ME, "", 0.0) is None
    for state in (OpState.OPEN, OpState.DONE):
        txn = preemption.answer(running(*asked(state)), ME, "", 0.0)
        assert txn is not None and txn.name == "undrain"
    assert preemption.answer(running(*asked(op_id="d-123")), ME, "", 0.0) is None, "an operator's drain is the operator's"


def test_a_second_notice_is_another_request() -> None:
    done = running(asked(OpState.DONE)[0])
    txn = preemption.answer(done, ME, "again", 0.0)
    assert txn is not None
    assert any(o.key == KEYS.op("notice-a-a.1-1") for o in txn.ops)  # type: ignore[union-attr]


def test_when_nothing_depends_on_it() -> None:
    assert not preemption.gone(running(), ME)
    assert preemption.gone(running(), seat("s"))
