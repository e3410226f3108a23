"""Slurm's hostlists and topology strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmrun.core.errors import UsageError
from tmrun.core.hostlist import compress, expand, topology_labels


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("node[3-5,9],head", ["node3", "node4", "node5", "node9", "head"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a,,a,b", ["a", "b"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["node[3-", "node3]", "node[[1]]", "node[a-b]", "node[]", "node[5-3]", "node[0-99999999]"])
def test_bad_hostlists_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="hostlist") as caught:
        expand(text)
    assert "\n" not in str(caught.value)


@given(st.sets(st.builds(lambda stem, number: f"{stem}{number}", st.sampled_from(["node", "gpu-a", "rack1-n0"]), st.integers(0, 2000))))
def test_compress_is_undone_by_expand(names: set[str]) -> None:
    assert set(expand(compress(sorted(names)))) == names


def test_compress_reads_as_people_write() -> None:
    assert compress(["node3", "node4", "node5", "node9", "head"]) == "node[3-5,9],head"
    assert compress(["n08", "n09", "n10"]) == "n[08-09],n10"  # padded names and others are kept apart
    assert compress(["node7"]) == "node7"
    assert compress([]) == ""


def test_topology_of_slurm_becomes_labels() -> None:
    assert topology_labels("s0.s5.node3", "switch.switch.node") == {"switch": "s5", "switch2": "s0"}
    assert topology_labels("node3", "node") == {}
    assert topology_labels("odd", "switch.node") == {}
