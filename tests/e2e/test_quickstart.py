"""The quick start, command by command, as somebody would type it; what it says is printed is what is printed."""

from __future__ import annotations

import re

from e2e_lab import ROOT, Lab, wait_for
from shell import Shell

PAGE = (ROOT / "docs" / "quickstart.md").read_text()


def section(name: str) -> str:
    """The text below a heading."""
    return PAGE.split(f"## {name}\n")[1].split("\n## ")[0]


def blocks(text: str, language: str) -> list[list[str]]:
    """Lines of its fenced blocks, without comments."""
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [[line.split("   #")[0].strip() for line in block.splitlines()] for block in found]


def shape(lines: list[str]) -> list[str]:
    """Without what differs from run to run."""
    return [re.sub(r"d-[0-9a-f]{6}", "d-#", re.sub(r"\d+\.\d+", "#.#", re.sub(r"\bstep \d+", "step #", line))) for line in lines]


def test_one_machine(lab: Lab) -> None:
    shell, text = Shell(lab), section("One machine")
    (launch,), look, again = blocks(text, "sh")
    (printed,) = blocks(text, "text")
    assert launch.startswith("tmrun --local-nodes 3 ")
    lab.logs.append(lab.folder / "tmrun-quick.log")
    told = shell.must(launch.replace("tmrun ", "tmrun --detach --job quick ", 1))
    assert "job quick runs in the background" in told
    try:
        lab.wait_warm()
        assert "tmrun: node2 is a warm standby" in lab.output()

        assert [line.split()[1] for line in look] == ["status", "top", "drain", "history"]
        for line in look:
            if line == "tmrun top":
                assert "running" in shell.run(f"timeout 5 {line}").stdout  # no terminal: lines, until somebody ends it
            elif line.startswith("tmrun drain"):
                assert shape(shell.must(line).splitlines()) == shape(printed)
            else:
                shell.must(line)

        for line in again:
            if line == "tmrun stop":
                assert [r["cause"] for r in lab.history()[1:]] == ["drain", "failure"]
            if line.startswith("kill"):
                lab.wait_warm()
                epoch = lab.status()["epoch"]
                shell.must(line)
                wait_for("the rank is replaced", lambda e=epoch: (s := lab.status()) and s["epoch"] == e + 1 and s["state"] == "running")
            else:
                shell.must(line)
    finally:
        shell.run("tmrun stop -y")
        wait_for("everything is gone", lambda: lab.leftovers() == [])
    assert "job quick stopped after" in lab.output()
