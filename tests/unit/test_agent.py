"""An agent is put together, and signals reach its loop whenever they come; each in a process of its own, with the model for a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
import sys
from pathlib import Path
from tmrun.config import AgentConfig, StoreAccess
from tmrun.core import transactions
from tmrun.core.keys import Keys
from tmrun.core.membership import Job, fold
from tmrun.core.model import End, JobState, Spec
from tmrun.store.memory import MemoryWorld
from tmrun_agent.__main__ import _serve

store, keys = MemoryWorld().client(), Keys("job")
store.commit(transactions.create_spec(Job(keys), Spec(1, 1, 0, ("train.py",))))
store.commit(transactions.end_job(fold(keys, store.list(keys.ctl).entries), End(JobState.FAILED, 42, "as it was"), as_leader=False))
code = _serve(AgentConfig("job", "node0", StoreAccess("http://nowhere:1"), "127.0.0.1", sys.argv[1], "marker", 1, {}, 1.0), store)
print(code, store.get(keys.member("node0")))
"""


def test_its_parts_fit_together(tmp_path: Path) -> None:
    """It registers in a job that has ended, ends as the job did, and leaves nothing registered."""
    env = {**os.environ, "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    done = subprocess.run([sys.executable, "-c", ENDED, str(tmp_path)], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert (tmp_path / "node0.timers").is_fifo()
    assert done.stdout == "42 None\n"
