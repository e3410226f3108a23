"""What the documentation shows: its pages, their fenced blocks, the command lines in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(str(page.relative_to(ROOT)), text) for page in PAGES for text in fence.findall(page.read_text())]


def commands() -> list[tuple[str, str]]:
    """(page, command line), continued lines joined, comments removed."""
    found = []
    for page, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = re.sub(r"(^|\s+)#( .*|)$", "", line).strip()
            if words:
                found.append((page, words))
    return found
