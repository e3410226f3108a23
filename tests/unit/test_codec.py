"""Records survive the store; what cannot be read says which field and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmrun.core import codec
from tmrun.core.codec import CodecError, decode, encode
from tmrun.core.membership import RECORDS
from tmrun.core.model import Head, Kind, Member, Progress, RankMap, Seat, Spec, Timing, Vote

ALL = [*RECORDS.values(), Progress, Timing]


@pytest.mark.parametrize("record", ALL, ids=lambda r: r.__name__)
def test_every_record_round_trips(record: type[Any]) -> None:
    @given(st.from_type(record))
    def check(value: Any) -> None:
        assert encode(decode(record, encode(value))) == encode(value)  # the texts: nan is not itself

    check()


@pytest.mark.parametrize(
    ("record", "change", "names"),
    [
        (Head, {"epoch": "1"}, "Head.epoch"),
        (Head, {"epoch": True}, "Head.epoch"),
        (Head, {"epoch": None}, "Head.epoch"),
        (RankMap, {"kind": "sideways"}, "RankMap.kind"),
        (RankMap, {"seats": [1]}, "RankMap.seats"),
        (RankMap, {"seats": {"host": "a"}}, "RankMap.seats"),
        (Member, {"labels": {"rack": 1}}, "Member.labels"),
    ],
)
def test_a_wrong_type_is_named(record: type[Any], change: dict[str, Any], names: str) -> None:
    good = {
        Head: {"epoch": 1},
        RankMap: {"epoch": 1, "kind": "initial", "seats": [], "generation": 1},
        Member: {"host": "a", "incarnation": "b", "address": "c", "pid": 1, "version": "1"},
    }[record]
    with pytest.raises(CodecError, match=names.replace(".", r"\.")):
        decode(record, json.dumps({**good, **change}))


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(CodecError, match="Head"):
        decode(Head, text)


def test_a_missing_field_without_default_is_refused() -> None:
    with pytest.raises(CodecError, match="Head"):
        decode(Head, "{}")


def test_unknown_fields_are_ignored_and_missing_ones_take_their_default() -> None:
    assert decode(Head, '{"epoch":3,"colour":"red"}') == Head(3)


def test_a_newer_schema_is_refused_with_advice() -> None:
    with pytest.raises(CodecError, match="upgrade tmrun"):
        decode(Head, json.dumps({"v": codec.SCHEMA + 1, "epoch": 1}))


def test_text_is_stable() -> None:
    """Guards compare values, so equal records must be equal texts."""
    seat: Any = Seat
    one = RankMap(2, Kind.DRAIN, (seat("a", "b"),), 1)
    assert encode(one) == encode(decode(RankMap, encode(one)))
    assert encode(Vote(seat("a", "b").host, seat("a", "b").incarnation, 1, True)).startswith('{"again"')
    assert json.loads(encode(Spec(1, 1, 0, ("a",))))["v"] == codec.SCHEMA
