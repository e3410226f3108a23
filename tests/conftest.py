"""For all tests: what this run inherited does not decide what is tested."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a shell in the background; the launchers under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
