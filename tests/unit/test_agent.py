"""An agent is put together, and signals reach its loop whenever they come; each in a process of its own, with the model for a store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_core import KEYS, member
from tmrun_agent import patience
from tmrun_agent.feeders import Interrupted, StoreMoved
from tmrun_agent.lease import Lease, enter, register
from tmrun_agent.loop import Inbox
from tmrun_agent.patience import Patience

from tmrun.core import errors
from tmrun.core.errors import OutcomeUnknown, StoreUnavailable
from tmrun.store.memory import Fate, MemoryWorld

SIGNALS = """
import os, queue, signal, threading
from tmrun_agent.__main__ import heed
from tmrun_agent.loop import Inbox

inbox, heard = Inbox(), 0
heed(inbox)
def send():
    for _ in range(20_000):
        os.kill(os.getpid(), signal.SIGTERM)
    inbox.put(None)
sender = threading.Thread(target=send)
sender.start()
while True:
    try:
        item = inbox.get_nowait()
    except queue.Empty:
        continue
    if item is None:
        break
    heard += 1
print(heard > 0)
"""


def test_a_signal_that_interrupts_the_inbox_itself_does_not_stop_the_agent() -> None:
    """Handlers run in the thread that reads: what it holds just then must not be waited for."""
    done = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


ENDED = """
import sys, threading
from pathlib import Path
from tmrun.config import AgentConfig, StoreAccess
from tmrun.core import transactions
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, fold
from tmrun.core.model import End, JobState, Spec
from tmrun.store.etcd import boottime
from tmrun.store.memory import MemoryWorld
from tmrun_agent.__main__ import _serve
from tmrun_agent.processes import Processes

tended = []
Processes.tend = lambda self: tended.append(self)
world = MemoryWorld()
world.clock.now = boottime()  # by which an agent measures how long the store is silent
store, keys = world.client(), Keys("job")
store.commit(transactions.create_spec(Job(keys), Spec(1, 1, 0, ("train.py",))))
store.commit(transactions.end_job(fold(keys, store.list(keys.ctl).entries), End(JobState.FAILED, 42, "as it was"), as_leader=False))
store.partitioned = True
threading.Timer(1.0, lambda: setattr(store, "partitioned", False)).start()
where = StoreAccess("http://nowhere:1")
code = _serve(AgentConfig("job", "node0", where, "127.0.0.1", sys.argv[1], "marker", 1, ("train.py",), {}, 1.0, store_wait_s=60), store)
print(code, store.get(keys.member("node0")), len(tended) > 0)
"""


def test_its_parts_fit_together(tmp_path: Path) -> None:
    """It waits for the store, registers in a job that has ended, ends as the job did, and leaves nothing registered."""
    env = {**os.environ, "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    done = subprocess.run([sys.executable, "-c", ENDED, str(tmp_path)], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert (tmp_path / "node0.timers").is_fifo()
    assert done.stdout == "42 None True\n"
    assert "it is asked again, 60 s at most" in done.stderr


class Blip:
    """A store that does not answer at first."""

    def __init__(self, times: int) -> None:
        self.left = times

    def get(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise StoreUnavailable("no answer from the store")
        return "value"


def test_a_store_that_does_not_answer_at_the_start_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "AGAIN_S", 0.01)
    inbox = Inbox()
    inbox.put(StoreMoved())
    assert Patience("a", inbox, 60).ask(Blip(3).get) == "value"
    assert capfd.readouterr().err == "tmrun: a: no answer from the store; it is asked again, 60 s at most\n"
    assert inbox.get_nowait() == StoreMoved(), "it is the loop's"
    with pytest.raises(StoreUnavailable):
        Patience("a", inbox, 0.1).ask(Blip(10**9).get)
    inbox.put(Interrupted(signal.SIGTERM))
    with pytest.raises(errors.Interrupted) as end:
        Patience("a", inbox, 60).ask(Blip(10**9).get)
    assert end.value.exit_code == 143


def test_a_registration_whose_answer_was_lost() -> None:
    """Tried again under another lease, it is there already."""
    store, told = MemoryWorld().client(), list[str]()
    lease = Lease(store, 10, lambda _: None, lambda: 0.0)
    store.next_commits(Fate.APPLIED_UNANSWERED)
    with pytest.raises(OutcomeUnknown):
        enter(lease, KEYS, member("a"), told.append, time.sleep)
    enter(lease, KEYS, member("a"), told.append, time.sleep)
    assert told == []


def test_two_hosts_of_one_name_hear_of_it_at_once() -> None:
    store, told = MemoryWorld().client(), list[str]()
    first = store.grant(100)
    register(store, KEYS, member("a"), first, 10, told.append, time.sleep)
    other = replace(member("a", 2), address="10.0.0.2")
    register(store, KEYS, other, store.grant(100), 10, told.append, lambda _: store.revoke(first))
    assert told == [
        "a: waiting for an earlier registration of this name to expire; it is from addr-a, this host is 10.0.0.2: "
        "if these are two hosts, give each a --node-name of its own"
    ]


def test_a_signal_is_heeded_while_a_name_is_waited_for() -> None:
    """The job is in no need of the host that it takes away."""
    store, inbox = MemoryWorld().client(), Inbox()
    register(store, KEYS, member("a"), store.grant(100), 10, lambda _: None, time.sleep)
    asks, lease = Patience("a", inbox, 60), Lease(store, 10, lambda _: None, lambda: 0.0)
    interrupt = Interrupted(signal.SIGTERM)
    with pytest.raises(errors.Interrupted) as end:
        asks.ask(lambda: enter(lease, KEYS, member("a", 2), lambda _: inbox.put(interrupt), asks.pause))
    assert end.value.exit_code == 143
