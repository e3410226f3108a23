"""The generated parts of README.md and docs/bench.md: everything between a pair of markers comes from the rows. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from bench.compare import report
from bench.compare.plan import TITLES
from bench.compare.report import Row

Suites = Mapping[str, Sequence[Row]]
NOTE = (
    "Seconds from the end of the last completed step before the event to the end of the first new one, less the median step: median "
    "[min–max]. (×): share of torchrun's median. “tuned”: each at its best for steps this short; “defaults”: as it comes. "
    "A system that does worse than a peer stands here all the same."
)
SCALE = "scale"
NONE = "measures all of this side by side; no run is recorded yet"


def compare_core(suites: Suites) -> str:
    """README's table."""
    rows = suites.get("core", ())
    if not rows:
        return f"`make bench` {NONE}."
    parts = []
    for setting in report.settings(rows):
        parts += [f"{report.setting_text(setting)}:", "", report.markdown(*report.comparison(rows, setting)), ""]
    exact = ", ".join(f"{TITLES[s]}: {v}" for s, v in report.exactness(rows).items() if v != "–")
    return "\n".join(
        [*parts, NOTE, "", f"Losses bitwise those of an uninterrupted run: {exact}.", "", f"`make bench`; {report.provenance(rows)}"]
    )


def compare_all(suites: Suites) -> str:
    """docs/bench.md's tables: every suite, every setting."""
    parts: list[str] = []
    for name, rows in suites.items():
        if name == SCALE:
            continue
        parts += [f"### {name}", ""]
        if not rows:
            parts += [f"`{command(name)}` {NONE}.", ""]
            continue
        if name == "growth":
            parts += [report.markdown(*report.growth(rows)), ""]
        else:
            for setting in report.settings(rows):
                parts += [f"{report.setting_text(setting)}:", "", report.markdown(*report.comparison(rows, setting)), ""]
        header, lines = report.phases(rows)
        if lines:
            parts += ["How tmrun splits its pause (medians, seconds):", "", report.markdown(header, lines), ""]
        parts += [f"![downtime]({picture(name)})", "", f"`{command(name)}`; {report.provenance(rows)}", ""]
    return "\n".join(parts).rstrip()


def scale(suites: Suites) -> str:
    """The control plane's table."""
    rows = suites.get(SCALE, ())
    if not rows:
        return f"`make bench-scale` {NONE}."
    machine = rows[-1]["machine"]
    source = f"`make bench-scale`; {machine['cores']} cores of {machine['cpu']}, {rows[-1]['date'][:10]}."
    return f"{report.markdown(*report.scale(rows))}\n\n{source}"


def command(suite: str) -> str:
    """What runs it."""
    return "make bench" if suite == "core" else f"make bench SUITES={suite}"


def picture(suite: str) -> str:
    """File name of its plot, beside docs/bench.md."""
    return f"bench/{suite}.svg"


GENERATED: dict[str, Callable[[Suites], str]] = {"compare-core": compare_core, "compare-all": compare_all, SCALE: scale}


def fill(text: str, suites: Suites) -> str:
    """The document with its generated parts made anew."""

    def new(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- generated: {name} -->\n{GENERATED[name](suites)}\n<!-- /generated -->"

    return re.sub(r"<!-- generated: (?P<name>[\w-]+) -->\n.*?<!-- /generated -->", new, text, flags=re.DOTALL)
