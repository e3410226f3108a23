"""What is measured: trials, and the sets of them that one command runs. Pure; may not know how a system is launched.

A trial is one repetition of one event on one system. Repetitions are the outermost loop, so that the systems take turns and a slow hour
of the machine meets all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

SYSTEMS = ("torchrun", "ft_launcher", "inprocess", "torchft", "tmrun-cold", "tmrun")
"""In the order of the tables; torchrun is what the others are compared with. ``tmrun-cold`` is tmrun without a standby."""
TITLES = {
    "torchrun": "torchrun",
    "ft_launcher": "ft_launcher, hot spare",
    "inprocess": "NVRx in-process, reserve rank",
    "torchft": "torchft, world shrinks",
    "tmrun-cold": "tmrun, no standby",
    "tmrun": "tmrun, standby",
}
EVENTS = {
    "kill": "kill a worker",
    "lose": "lose a node",
    "drain": "planned drain",
    "frozen": "frozen worker",
    "silent": "silent node",
    "dead_link": "dead link",
    "straggler": "straggler: steps × longer",
    "store_host": "lose the store's host",
}
CORE = ("kill", "lose", "drain", "frozen", "silent")
STATES = {"small": (64, 2, 8), "40MB": (256, 4, 4), "100MB": (384, 5, 2), "200MB": (512, 5, 2), "400MB": (704, 6, 1)}
"""Name -> (width, layers, batch a rank) of the GPT: parameters and AdamW's moments make about that much state."""
COMPILED = ("off", "warm", "cold")
"""torch.compile: off, with a kernel cache that all hosts share and that is filled, with an empty one on every host."""
UNMEASURED = ("error", "not installed")
"""Outcomes that say nothing about the system: the bench itself failed, or a peer is not there. The next run tries again."""
GUESS_S = 35.0
"""What a trial takes, until one was run."""
ENOUGH_FAILURES = 2
"""What did not recover so often, and never did, is not run again: it costs the whole patience every time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. ``mbit``: bandwidth of every host's link, 0 for unlimited; with ``netns`` every host is a network namespace."""

    system: str
    tuned: bool
    event: str
    nodes: int = 2
    state: str = "small"
    compiled: str = "off"
    mbit: int = 0
    netns: bool = False
    rep: int = 0

    @property
    def key(self) -> str:
        """Names the trial in a file of rows."""
        return f"{self.case} #{self.rep}"

    @property
    def case(self) -> str:
        """What its repetitions share."""
        tuning = "tuned" if self.tuned else "default"
        where = f"{self.mbit}mbit" if self.mbit else "netns" if self.netns else "loopback"
        return f"{self.system} {tuning} {self.event} n{self.nodes} {self.state} {self.compiled} {where}"


@dataclass(frozen=True, slots=True)
class Suite:
    """What one command runs: every system of ``systems`` with every setting of ``settings``."""

    settings: tuple[Mapping[str, Any], ...]
    systems: tuple[str, ...] = SYSTEMS
    tunings: tuple[bool, ...] = (True, False)

    def trials(self, repetitions: int) -> Iterator[Trial]:
        """All of them, systems taking turns."""
        for rep in range(repetitions):
            for setting in self.settings:
                for tuned in self.tunings:
                    for system in self.systems:
                        yield namespaced(Trial(system=system, tuned=tuned, rep=rep, **setting))


def namespaced(trial: Trial) -> Trial:
    """Some trials are only possible between hosts with links of their own."""
    return replace(trial, netns=trial.netns or trial.mbit > 0 or trial.event in ("dead_link", "store_host"))


def _events(events: Iterable[str], **setting: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple({"event": e, **setting} for e in events)


SUITES: dict[str, Suite] = {
    "core": Suite(_events(CORE)),
    "network": Suite(_events(("dead_link", "store_host")), tunings=(True,)),
    "straggler": Suite(_events(("straggler",)), tunings=(True,)),
    "nodes": Suite(_events(CORE, nodes=4), tunings=(True,)),
    "state": Suite(_events(("kill", "lose", "drain"), state="200MB"), tunings=(True,)),
    "throttled": Suite(
        (*_events(("kill", "drain"), state="200MB", mbit=1000), *_events(("kill",), state="200MB", mbit=1000, nodes=4)),
        tunings=(True,),
    ),
    "compile": Suite(
        (*_events(("kill", "lose"), compiled="warm"), *_events(("lose",), compiled="cold")),
        tunings=(True,),
    ),
    "growth": Suite(
        (
            *(s for state in STATES for s in _events(("kill", "drain"), state=state)),
            *(s for nodes in (4, 8, 16) for s in _events(("kill", "drain"), nodes=nodes)),
        ),
        systems=("torchrun", "tmrun"),
        tunings=(True,),
    ),
}


def minutes(trials: Sequence[Trial], seconds: Mapping[str, float]) -> float:
    """About how long they take. ``seconds``: what earlier trials of a case took."""
    known = sorted(seconds.values())
    usual = known[len(known) // 2] if known else GUESS_S
    return sum(seconds.get(t.case, usual) for t in trials) / 60


def to_run(trials: Iterable[Trial], rows: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """Those without a row that says how the system did."""
    done = {row["key"] for row in rows if row["outcome"] not in UNMEASURED}
    return [t for t in trials if t.key not in done]


def hopeless(trial: Trial, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether this case is known not to recover."""
    outcomes = [row["outcome"] for row in rows if row["case"] == trial.case and row["outcome"] not in UNMEASURED]
    return len(outcomes) >= ENOUGH_FAILURES and "recovered" not in outcomes


def as_json(trial: Trial) -> dict[str, Any]:
    """Its fields."""
    return asdict(trial)
