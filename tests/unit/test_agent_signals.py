"""Signals reach an agent's loop whenever they come."""

from __future__ import annotations

import subprocess
import sys

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
