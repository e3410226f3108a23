"""Golden text scenarios: the protocol's manual. ``TMRUN_REWRITE=1 pytest tests/scenarios`` writes anew what happens.

A file is a title, then commands (lines that begin with ``>``), each followed by what it made happen:

    > hosts 3                    three hosts join; the job has 2 slots, 1 process each, 1 standby (nproc, nnodes: > hosts 4 nnodes=3)
    > run                        everybody acts in turn until the job trains with nothing left to do
    > run until TEXT             ... until a line contains TEXT
    > drain node0 | cancel node0 | kill agent node0 | bury node0 | kill worker node0 [code] | lose answer node0 | cut node0 | heal node0
    > hang node0 (one of its workers gets stuck) | term node0 (SIGTERM to its agent)
    > freeze node0 | thaw node0 | wait 10 | train 10 | add node4 | status
    > cordon node0 | uncordon node0 | pause | resume | replace node0 | drain_within 5 node0

Steps of training and changes of a member's own entry are left out.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training import Violation
from world import SPEC, World

from tmrun.core import states
from tmrun.core.model import Verb
from tmrun.core.states import known_hosts, node_state

HERE = Path(__file__).parent
QUIET = re.compile(
    r"(enters|passes) step|update member|registers$| hears of |is told to prepare|: commit \d+ -> |: prepare .* -> |: switch slot"
)


class Play:
    """Runs the commands of one scenario."""

    world: World

    def command(self, text: str) -> list[str]:
        """What one line made happen."""
        verb, *words = text.split()
        found: Any = getattr(self, f"do_{verb}")(*words)
        return [line for line in found or [] if not QUIET.search(line)]

    def do_hosts(self, count: str, *changes: str) -> None:
        values = {k: float(v) if "." in v else int(v) for k, v in (c.split("=") for c in changes)}
        replicated = bool(values.pop("replicated", 1))
        total = int(values.pop("steps", 100_000))
        values |= {"hang_action": "notify"} if values.pop("notify", 0) else {}  # type: ignore[dict-item]
        self.world = World(int(count), replace(SPEC, **values), total, replicated=replicated)  # type: ignore[arg-type]

    def do_run(self, *until: str) -> list[str]:
        if until:
            return self.world.run(until=re.escape(" ".join(until[1:])))
        return self.world.run()

    def do_rounds(self, count: str) -> list[str]:
        return [line for _ in range(int(count)) for line in self.world.round()]

    def do_train(self, seconds: str) -> list[str]:
        lines = []
        for _ in range(int(seconds)):
            lines += self.do_rounds("8")
            self.world.advance(1)
        return lines

    def do_wait(self, seconds: str) -> list[str]:
        self.world.advance(float(seconds))
        return []

    def do_drain(self, *hosts: str) -> list[str]:
        return [f"request {self.world.drain(*hosts)} is written, {', '.join(hosts)} cordoned"]

    def do_drain_within(self, seconds: str, host: str) -> list[str]:
        return [f"request {self.world.drain(host, force_after_s=float(seconds))} is written, {host} cordoned"]

    def do_replace(self, host: str) -> list[str]:
        return [f"request {self.world.drain(host, verb=Verb.REPLACE)} is written, {host} cordoned"]

    def do_cordon(self, host: str) -> list[str]:
        return [f"cordon {host}: {self.world.cordon(host)}"]

    def do_uncordon(self, host: str) -> list[str]:
        return [f"uncordon {host}: {self.world.cordon(host, wanted=False)}"]

    def do_pause(self) -> list[str]:
        return [f"pause: {self.world.pause()}"]

    def do_resume(self) -> list[str]:
        return [f"resume: {self.world.pause(wanted=False)}"]

    def do_cancel(self, host: str) -> list[str]:
        return [self.world.take_back(host)]

    def do_kill(self, what: str, host: str, code: str = "137") -> list[str]:
        if what == "agent":
            self.world.kill_agent(host)
        else:
            self.world.kill_worker(host, int(code))
        return []

    def do_hang(self, host: str) -> list[str]:
        self.world.hang(host)
        return []

    def do_term(self, host: str) -> None:
        self.world.term(host)

    def do_bury(self, host: str) -> None:
        self.world.bury(host)

    def do_add(self, host: str) -> None:
        self.world.add_host(host)

    def do_lose(self, _: str, host: str) -> None:
        self.world.lose_answer(host, applied=True)

    def do_cut(self, host: str) -> None:
        self.world.agents[host].store.partitioned = True

    def do_heal(self, host: str) -> None:
        self.world.agents[host].store.partitioned = False

    def do_revoke(self, host: str) -> None:
        self.world.store.revoke(self.world.agents[host].node.lease)

    def do_freeze(self, host: str) -> None:
        self.world.agents[host].frozen = self.world.agents[host].store.partitioned = True

    def do_thaw(self, host: str) -> None:
        self.world.agents[host].frozen = self.world.agents[host].store.partitioned = False

    def do_status(self) -> list[str]:
        job = self.world.job()
        state, why = states.job_state(job)
        rows = [f"{h}: {' - '.join(x for x in node_state(job, h) if x)}" for h in known_hosts(job)]
        ops = [f"{o.id}: {o.state.value}{' - ' + o.detail if o.detail else ''}" for o in job.ops.values()]
        said = [] if state.value != "running" and job.end else [f"coordinator {self.world.thinks()}"]
        return [f"job: {state.value}{' - ' + why if why else ''}, epoch {job.epoch}", *rows, *ops, *said]


def perform(text: str) -> str:
    """The scenario with what really happens."""
    play, lines = Play(), []
    for line in text.splitlines():
        if line.startswith("> "):
            lines += ["", line] if lines and lines[-1] else [line]
            try:
                lines += [f"    {told}".rstrip() for told in play.command(line[2:])]
            except Violation as error:
                lines.append(f"    VIOLATION {error}")
        elif not line.startswith("    ") and (line or (lines and lines[-1])):
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    happens = perform(text)
    if os.environ.get("TMRUN_REWRITE"):
        path.write_text(happens)
    assert "VIOLATION" not in happens
    assert happens == (path.read_text() if os.environ.get("TMRUN_REWRITE") else text)
