"""``make gpu-check`` itself: what it says without a GPU, how it goes on when a part fails, what it writes. Nothing about GPUs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_check

ROOT = Path(gpu_check.__file__).resolve().parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_one_line_and_its_exit_code_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == gpu_check.NO_GPU == 77
    assert done.stdout.startswith("gpu-check: no GPU here (torch ") and done.stdout.count("\n") == 1
    assert not (tmp_path / "out").exists()


def args(out: Path, budget: float = 60) -> argparse.Namespace:
    return argparse.Namespace(out=out, budget=budget, device="cpu", parts="")


def test_a_part_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    check = gpu_check.Check(args(tmp_path))

    def fail() -> dict[str, Any]:
        raise RuntimeError("NCCL said no\nbecause")

    check.part("nccl", fail)
    check.part("gloo", lambda: {"exact": True, "phases_s": {"pause": {2: 0.1}}})
    check.args.budget = -1
    check.part("memory", fail)
    written = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert [(name, part["ok"]) for name, part in written.items()] == [("nccl", False), ("gloo", True), ("memory", True)]
    assert "NCCL said no" in written["nccl"]["error"] and written["memory"]["left out"] == "no time"
    check.folder.cleanup()
    text = gpu_check.text_of(check.report)
    assert "says nothing about GPUs" in text and "| nccl | NCCL said no; because" in text and "bitwise the same" in text


def test_the_trace_is_drawn() -> None:
    traces = {"17": [[t, 10.0, 20.0 + t, 100.0] for t in range(100, 130)], "18": [[t, 5.0, 9.0, 110.0] for t in range(110, 140)]}
    events = [(112.0, "drain"), (113.0, "drained"), (125.0, "killed"), (126.0, "healed")]
    svg = gpu_check.drawing(traces, events, "cuda")
    assert svg.count("<polyline") == 3 and all(what in svg for _, what in events)
    assert svg == gpu_check.drawing(traces, events, "cuda")


def test_the_switch_of_one_process_over_a_stand_in() -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu_switch.py"), "--device", "cpu", "--switches", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=gpu_check.environment())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["seconds"]) == {"build", "switch", "give back", "first use"}
    assert result["seconds"]["give back"] >= 0.1 and result["abort"]["device works"] is True
