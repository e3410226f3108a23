"""The parts of ``make gpu-check`` that start processes, tried on the CPU: that they run and say what they should. Nothing about GPUs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from cluster import Cluster
from nursery import Nursery

from bench import gpu_check


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_check.Check:
    monkeypatch.setattr(gpu_check, "COMPILED", ((),))
    return gpu_check.Check(argparse.Namespace(out=tmp_path, budget=600, device="cpu", parts=""))


def test_warm(check: gpu_check.Check, tmp_path: Path) -> None:
    check.part("warm", check.warm)
    check.folder.cleanup()
    (part,) = json.loads((tmp_path / "gpu_check.json").read_text())["parts"].values()
    assert part["ok"], part
    found = part["seconds"]
    assert found.keys() == set(gpu_check.MODES)
    assert found["rehearsed"]["ready_s"] < found["cold"]["ready_s"], "it has done its rehearsal before it is asked"
    assert all(list(each["age_s"]) == ["imported", "device", "model", "step 0", "step 1", "step 2"] for each in found.values())
    assert found["rehearsed"]["peak_mb"] > 0 and "rehearsed" in gpu_check.text_of(check.report)


def test_ranks_move_and_memory_is_drawn(check: gpu_check.Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery) -> None:
    monkeypatch.setattr(Cluster, "nursery", nursery)
    check.part("nccl", check.nccl)  # gloo, here
    check.part("memory", check.memory)
    check.folder.cleanup()
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert parts["nccl"]["ok"] and parts["memory"]["ok"], parts
    assert parts["nccl"]["exact"] and parts["nccl"]["phases_s"].keys() == {"epoch 2, joiner", "epoch 3, joiner", "pause"}
    assert len(parts["memory"]["peaks"]) == 4, "two ranks, and two that took over from them"
    assert (tmp_path / "memory.svg").read_text().count("<polyline") == 5
    assert "| nccl | bitwise the same through a drain and a kill" in gpu_check.text_of(check.report)
