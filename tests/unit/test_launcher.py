"""A launcher none of whose agents is left: who still needs it. The store is the model, its agent a real process that has ended."""

from __future__ import annotations

import queue
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from test_core import KEYS, member, seat
from tmrun_agent.lease import register

from tmrun.cli import jobs, own_store
from tmrun.cli.console import Console
from tmrun.cli.hooks import Wanted
from tmrun.cli.keep import LOOK_S
from tmrun.cli.labels import Labels
from tmrun.cli.launch import Launch, Launcher, Where
from tmrun.config import NoticeSources, StoreAccess
from tmrun.core import codec, transactions
from tmrun.core.errors import Interrupted, StoreError, TmrunError, UsageError
from tmrun.core.membership import Job, fold
from tmrun.core.model import End, JobState, Kind, Leader, Spec, Term
from tmrun.core.streams import Output
from tmrun.store.embedded import EmbeddedEtcd
from tmrun.store.memory import MemoryStore, MemoryWorld
from tmrun.tui.footer import Footer

SPEC = Spec(1, 1, 1, ("train.py",))


class Healthy:
    """An etcd of ours that runs."""

    def exit_code(self) -> None:
        return None


class Careless:
    """Nothing is labelled, nothing announced."""

    def labels(self) -> Labels:
        return Labels({}, None, None)

    def notices(self) -> NoticeSources:
        return NoticeSources()


class Said(Footer):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryWorld().client()


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def launcher(store: MemoryStore, said: Said, tmp_path: Path) -> Iterator[Launcher]:
    """It runs node a, which has left, and the store; node b is in the job too."""
    store.commit(transactions.create_spec(Job(KEYS), SPEC))
    register(store, KEYS, member("b"), store.grant(10_000), 10, said.say, time.sleep)
    own = own_store.OwnStore(StoreAccess("http://a:1"), [cast(EmbeddedEtcd, Healthy())])
    output: Any = Output()
    wanted = Launch(
        KEYS.job, SPEC, Where(0, "a", None), own_store.Choice(), cast(Any, None), 1.0, 1.0, output, (signal.SIGINT, signal.SIGTERM), ()
    )
    console = Console(jobs.Connection(store, KEYS), ("a",), Wanted(), said)
    found = Launcher(wanted, tmp_path, "marker-of-a-test", own, store, queue.SimpleQueue(), queue.SimpleQueue(), console)
    with subprocess.Popen(["sh", "-c", "exit 143"]) as agent:
        agent.wait()
        found.agents["a"] = cast(Any, agent)
        yield found


def look(launcher: Launcher) -> int | None:
    launcher._look_at = 0.0
    return launcher._turn()


def test_the_store_stays_while_others_are_in_the_job(launcher: Launcher, store: MemoryStore, said: Said) -> None:
    assert [look(launcher) for _ in range(3)] == [None, None, None]
    assert [line for line in said.lines if "store" in line] == [
        "tmrun: this host runs the job's store, which b still needs: it stays until the job ends (Ctrl-C stops the job)"
    ]
    store.partitioned = True
    assert look(launcher) is None, "its own etcd may just be started again"
    store.partitioned = False
    end = transactions.end_job(fold(KEYS, store.list(KEYS.ctl).entries), End(JobState.SUCCEEDED, 0, "done"), as_leader=False)
    assert store.commit(end).succeeded
    assert look(launcher) == 0


def test_its_own_store_is_waited_for_also_before_anybody_could_be_asked(launcher: Launcher, store: MemoryStore) -> None:
    store.partitioned = True
    assert look(launcher) is None
    store.partitioned = False
    assert look(launcher) is None


def test_a_store_that_others_took_with_them_is_not_waited_for_for_ever(launcher: Launcher, store: MemoryStore) -> None:
    """Two of three hosts have left: nobody answers, and nobody ever will."""
    now, launcher.own.hosts = [0.0], 3
    launcher.keep.clock = lambda: now[0]
    assert look(launcher) is None
    store.partitioned = True
    assert look(launcher) is None
    now[0] += SPEC.node_wait_s
    with pytest.raises(StoreError, match="lost"):
        look(launcher)


def test_a_signal_still_ends_it_at_once(launcher: Launcher, store: MemoryStore) -> None:
    assert look(launcher) is None
    launcher.interrupts.put(signal.SIGTERM)
    assert look(launcher) == 143
    end = store.get(KEYS.end)
    assert end is not None and codec.decode(End, end.value).state is JobState.STOPPED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("own", [True, False])
def test_a_signal_is_not_lost_while_the_store_is_silent(
    launcher: Launcher, store: MemoryStore, said: Said, number: signal.Signals, own: bool
) -> None:
    """Slurm sends one SIGTERM, and later SIGKILL. The agent ends its part; the launcher does not wait for the store."""
    if not own:
        launcher.own.members.clear()
    with _agent(launcher, "trap 'exit 143' TERM; echo; while :; do sleep 0.05; done") as agent:
        store.partitioned = True
        launcher.interrupts.put(number)
        assert look(launcher) is None
        assert [line for line in said.lines if number.name in line] == [
            f"tmrun: {number.name} while the store does not answer: this host ends its workers; once more kills its workers"
        ]
        assert look(launcher) in (None, 128 + number), "it asks its agent once"
        assert agent.wait(60) == 143
        assert look(launcher) == 128 + number


def test_a_stop_is_told_once_the_store_answers(launcher: Launcher, store: MemoryStore) -> None:
    with _agent(launcher, "trap '' TERM; echo; sleep 600") as agent:
        store.partitioned = True
        launcher.interrupts.put(signal.SIGINT)
        assert look(launcher) is None
        store.partitioned = False
        assert look(launcher) == 130
        end = store.get(KEYS.end)
        assert end is not None and codec.decode(End, end.value).reason == "SIGINT to a launcher"
        launcher.interrupts.put(signal.SIGINT)
        with pytest.raises(Interrupted):
            look(launcher)
        agent.kill()


@pytest.mark.parametrize("own", [True, False])
def test_an_agent_that_has_given_the_store_up_is_believed(launcher: Launcher, store: MemoryStore, own: bool) -> None:
    if not own:
        launcher.own.members.clear()
    with _agent(launcher, "echo; exit 6") as agent:
        agent.wait(60)
        store.partitioned = True
        with pytest.raises(StoreError, match="the store of job job is lost: nothing is left to do here"):
            look(launcher)


def test_it_is_started_again_if_the_store_answers_by_then(launcher: Launcher) -> None:
    with _agent(launcher, "echo; exit 6") as agent:
        agent.wait(60)
        launcher._started["a"] = 0.0
        assert look(launcher) is None
        assert list(launcher._again) == ["a"]


def test_a_planned_start_waits_for_a_store_that_is_silent(launcher: Launcher, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other hosts; no longer than the agent would wait for it, each time."""
    launcher.own.members.clear()
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with _agent(launcher, "echo; kill -9 $$") as agent:
        agent.wait(60)
    launcher._started["a"] = now[0]
    assert look(launcher) is None
    launcher._again["a"] = float("inf")
    for _ in range(2):
        store.partitioned = True
        assert look(launcher) is None
        now[0] += 0.9 * launcher.wanted.join_timeout_s
        assert look(launcher) is None
        store.partitioned = False
        assert look(launcher) is None
    store.partitioned = True
    assert look(launcher) is None
    now[0] += launcher.wanted.join_timeout_s
    with pytest.raises(StoreError, match="and agents of this host have died"):
        look(launcher)


def _agent(launcher: Launcher, script: str) -> subprocess.Popen[bytes]:
    """A shell in its place, that is ready."""
    agent = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert agent.stdout is not None and agent.stdout.readline() == b"\n"
    launcher.agents["a"] = cast(Any, agent)
    launcher._own.add(agent.pid)  # else it is an orphan that the launcher reaps
    return agent


def test_nobody_else_is_left(launcher: Launcher, store: MemoryStore) -> None:
    now = [0.0]
    launcher.keep.clock = lambda: now[0]
    assert look(launcher) is None
    _leave(store, "b")
    now[0] += LOOK_S
    with pytest.raises(TmrunError, match="all agents of the job have ended"):
        look(launcher)


def test_who_holds_ranks_may_come_back(launcher: Launcher, store: MemoryStore) -> None:
    """The leases of all may run out at once, when the store was away."""
    now = [0.0]
    launcher.keep.clock = lambda: now[0]
    store.put(KEYS.term, codec.encode(Term(1)))
    store.put(KEYS.leader, codec.encode(Leader(seat("b").host, seat("b").incarnation, 1)))
    job = fold(KEYS, store.list(KEYS.ctl).entries)
    assert store.commit(transactions.start(job, (seat("b"),), Kind.INITIAL, "enough nodes")).succeeded
    _leave(store, "b")
    assert look(launcher) is None
    now[0] += SPEC.node_wait_s - 1
    assert look(launcher) is None
    now[0] += LOOK_S
    with pytest.raises(TmrunError, match="all agents of the job have ended"):
        look(launcher)


SAME = {"arguments": ("train.py", "--rank", "1"), "where the script lies": ("/scratch/b/train.py",)}
OTHER = {
    "program": (replace(SPEC, command=("other.py",)), "the program 'train.py', here it is 'other.py'"),
    "module": (replace(SPEC, command=("-m", "train.py")), "here it is '-m train.py'"),
    "layout": (replace(SPEC, nproc=2), "nproc 1, here it is 2"),
    "role": (replace(SPEC, role="actor"), "role default, here it is actor"),
    "timeout": (replace(SPEC, node_wait_s=1.0), r"join_timeout 600\.0, here it is 1\.0"),
    "last call": (replace(SPEC, join_wait_s=1.0), r"last_call_timeout 30\.0, here it is 1\.0"),
    "hangs": (replace(SPEC, hang_timeout="9"), "hang_timeout auto, here it is 9"),
    "what a hang leads to": (replace(SPEC, hang_action="notify"), "hang_action replace, here it is notify"),
    "slow nodes": (replace(SPEC, straggler="off"), "straggler notify, here it is off"),
}


@pytest.mark.parametrize("case", SAME)
def test_what_hosts_may_do_differently(launcher: Launcher, case: str) -> None:
    launcher.wanted = replace(launcher.wanted, spec=replace(SPEC, command=SAME[case]))
    launcher.prepare()


@pytest.mark.parametrize("case", OTHER)
def test_what_they_may_not(launcher: Launcher, case: str) -> None:
    spec, text = OTHER[case]
    launcher.wanted = replace(launcher.wanted, spec=spec)
    with pytest.raises(UsageError, match=text) as refusal:
        launcher.prepare()
    assert str(refusal.value).endswith("if that launch is over, end it with `tmrun stop job`")


def test_an_agent_that_cannot_be_started_again_is_tried_later(launcher: Launcher, said: Said) -> None:
    """Its runtime folder is gone, say, or its disk is full."""
    launcher.folder = launcher.folder / "gone"
    where = replace(launcher.wanted.where, address="127.0.0.1")
    launcher.wanted = replace(launcher.wanted, care=cast(Any, Careless()), where=where)
    launcher._again["a"] = 0.0
    assert look(launcher) is None
    assert any("the agent of a cannot be started" in line and "tried again in 60 s" in line for line in said.lines), said.lines
    assert launcher._again["a"] > 0.0


def test_without_a_store_of_its_own_it_leaves(launcher: Launcher) -> None:
    launcher.own.members.clear()
    with pytest.raises(TmrunError, match="the job goes on without it"):
        look(launcher)


def _leave(store: MemoryStore, host: str) -> None:
    entry = store.get(KEYS.member(host))
    assert entry is not None
    store.revoke(entry.lease)
