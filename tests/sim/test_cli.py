"""``tmrun simulate`` and ``tmrun size`` as a user types them: tables, JSON, pictures, and one line for every mistake."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tmrun.cli import main

EXAMPLE = Path(__file__).parents[2] / "configs" / "simulate" / "example-trace.csv"


def tmrun(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main.run(list(args))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_trace_under_every_strategy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ("simulate", "--nodes", "64", "--trace", str(EXAMPLE), "--standby", "0,1,2", "--plot", str(tmp_path))
    code, out, err = tmrun(capsys, *args)
    assert code == 0
    for words in ("tmrun, 2 standbys", "checkpoint restart", "Oobleck-like", "ft_launcher-like", "REFILL", "ETTR", "no placement"):
        assert words in out
    assert {p.name for p in tmp_path.iterdir()} == {"where.svg", "week.svg", "ettr.svg"}
    for picture in tmp_path.iterdir():
        assert f"wrote {picture}" in err
        root = ElementTree.parse(picture).getroot()
        assert root.tag.endswith("svg") and len(list(root.iter())) > 40
    assert "tmrun, 2 standbys" in (tmp_path / "week.svg").read_text()
    again = tmrun(capsys, *args)[1]
    assert again == out, "deterministic"


def test_json_and_a_curve_over_scale(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ("--failures", "meta-rsc1", "--days", "4", "--standby", "1", "--replicas", "1", "--plot", str(tmp_path), "-o", "json")
    code, out, _ = tmrun(capsys, "simulate", "--nodes", "16,64", *args)
    document = json.loads(out)
    assert code == 0 and document["api_version"] == 1 and [s["gpus"] for s in document["sizes"]] == [128, 512]
    for row in document["sizes"][1]["strategies"]:
        paid = (row["gpus"] + row["standby_gpus"]) * 96
        assert sum(row["gpu_hours"].values()) == pytest.approx(paid), "every GPU-hour is in one term"
    assert "tmrun-1-bare" in {r["strategy"] for r in document["sizes"][0]["strategies"]}
    assert "scale.svg" in {p.name for p in tmp_path.iterdir()}


def test_what_was_drawn_can_be_kept_and_played_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = tmp_path / "t.csv"
    common = ("simulate", "--nodes", "64", "--days", "60", "--strategies", "tmrun-1,elastic", "--standby", "1", "-o", "json")
    first = json.loads(tmrun(capsys, *common, "--write-trace", str(kept))[1])
    second = json.loads(tmrun(capsys, *common, "--trace", str(kept))[1])
    for a, b in zip(first["sizes"][0]["strategies"], second["sizes"][0]["strategies"], strict=True):
        assert a["ettr"] == pytest.approx(b["ettr"], abs=1e-5) and a["counts"] == b["counts"]


def test_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = tmrun(capsys, "size", "--nodes", "64")
    assert code == 0
    assert "no standby wastes least: a standby costs 1,344 GPU-hours a week" in out
    assert "pays from about 512 nodes on" in out
    assert "--standby 6% for this job" in out and "4 nodes, 32 GPUs" in out and "8 nodes: not covered" in out
    code, out, _ = tmrun(capsys, "size", "--nodes", "8192", "--standby", "1", "-o", "json", "--plot", str(tmp_path))
    document = json.loads(out)
    assert document["best"]["standby"] >= 8 and document["wish"]["standby"] == 1
    assert {c["if"].split()[0] for c in document["sensitivity"]} == {"MTTF", "refill", "no", "rack"}
    assert (tmp_path / "standbys.svg").read_text().startswith("<svg")


def test_size_checked_by_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tmrun(capsys, "size", "--nodes", "32", "--mttf", "20", "--check", "--days", "7")
    assert code == 0 and "simulated, 7 days, seed 0" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("simulate", "--nodes", "many"), "--nodes 'many': expected whole numbers, such as 1024 or 128,1024,8192"),
        (("simulate", "--nodes", "1"), "--nodes 1: expected 2 to 16384"),
        (("simulate", "--days", "0"), "--days 0: expected a number above 0"),
        (("simulate", "--standby", "6%,lots"), "--standby 'lots': expected a number of nodes (2) or a share of the nodes (6%)"),
        (("simulate", "--strategies", "hope"), "--strategies 'hope': no such strategy; known: tmrun, checkpoint-restart"),
        (("simulate", "--failures", "nobody"), "--failures 'nobody': no such file, and not one of bytedance"),
        (("simulate", "--trace", "/nowhere.csv"), "/nowhere.csv: cannot be read: No such file or directory"),
        (("simulate", "--nodes", "8,16", "--trace", "x"), "--trace, --write-trace and --mttf belong to one size: give a single --nodes"),
        (("simulate", "--standby", "-1"), "--standby '-1': expected a number of nodes"),
        (("simulate", "--nodes", "8", "--standby", "9"), "--standby 9: 9 standbys for 8 nodes; expected at most one for each"),
        (("simulate", "--nodes", "8", "--replicas", "9"), "--replicas 9: expected 1 (fully sharded) to the number of nodes (8)"),
        (("simulate", "--nodes", "8", "--mttf", "inf"), "--mttf inf: expected hours above 0, at most 1,000,000,000"),
        (
            ("simulate", "--nodes", "8", "--mttf", "1e-5"),
            "about 16,800,000 faults in 7 days, more than the 200,000 that are simulated: give",
        ),
        (("simulate", "--plot", "/proc/none"), "--plot /proc/none: the folder cannot be made: "),
        (("simulate", "--png"), "--png says in which form pictures are written: give --plot FOLDER too"),
        (("simulate", "--costs", "papers"), "--costs 'papers': no such file, and not one of measured, paper"),
        (("size", "--nodes", "64", "--mttf", "-1"), "--mttf -1: expected hours above 0"),
        (("size", "--nodes", "64", "--warm", "nan"), "--warm nan: expected seconds, 0 to 1,000,000,000"),
        (("size", "--nodes", "64", "--standby", "many"), "--standby 'many': expected a number of nodes (2) or a share of the nodes (6%)"),
        (("size", "--nodes", "-4"), "--nodes -4: expected 2 to 16384"),
        (("size",), "missing option '--nodes'; see `tmrun size --help`"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str) -> None:
    code, out, err = tmrun(capsys, *args)
    assert (code, out) == (2, "") and err.startswith(f"tmrun: {said}") and err.count("\n") == 1


def test_pictures_as_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = tmrun(capsys, "size", "--nodes", "64", "--plot", str(tmp_path), "--png")
    assert code == 0 and err == f"wrote {tmp_path}/standbys.svg\nwrote {tmp_path}/standbys.png\n"
    head = (tmp_path / "standbys.png").read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:])
    root = ElementTree.parse(tmp_path / "standbys.svg").getroot()
    assert head.startswith(b"\x89PNG") and (width, height) == (2 * int(root.get("width", "")), 2 * int(root.get("height", "")))


def test_without_the_library_nothing_is_computed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    code, out, err = tmrun(capsys, "simulate", "--nodes", "8", "--plot", str(tmp_path / "new"), "--png")
    assert (code, out) == (2, "") and err == "tmrun: --png: the library that draws it is not installed: pip install 'tmrun[png]'\n"
    assert not (tmp_path / "new").exists()


def test_what_of_a_trace_cannot_happen_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("simulate", "--nodes", "8", "--standby", "0,2", "--days", "5", "--trace", str(EXAMPLE), "--story")
    code, out, _ = tmrun(capsys, *args)
    assert code == 0
    assert "1 of the trace's 10 faults: later than the simulated 5 days; left out" in out
    assert "6 of the trace's 10 faults: only at positions that the job does not have (it has 0-9: nodes and standbys); left out" in out
    assert "tmrun, 2 standbys: faults, and what its coordinator said" in out and "node5 drained (safe to power off)" in out
    assert "day 1 03:03:22  fault: exit at 3 (NVLink error)" in out
    assert json.loads(tmrun(capsys, *args, "-o", "json")[1])["notes"][0].startswith("1 of the trace's")


def test_malformed_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("time_s,kind,hosts\n1,exit,3\n2,exits,4\n")
    code, _, err = tmrun(capsys, "simulate", "--nodes", "8", "--trace", str(path))
    assert code == 2
    assert err == f"tmrun: {path}:3: kind 'exits' is none of exit, vanish, hang, slow, drain, alarm, software\n"
