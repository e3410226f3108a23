"""For all tests: what this run inherited does not decide what is tested."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a shell in the background; the launchers under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # speed is not what is tested
settings.load_profile("any machine")
