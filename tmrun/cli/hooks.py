"""Tell somebody of each event: a program of the user's, or a web address. On a thread of its own; a hook that fails or hangs costs nothing.

Each launcher tells the events of its own nodes, so over all hosts each event is told once. The event is JSON, on the program's standard
input or as the body of a POST. Neither is given the job's secret. May not know: jobs.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import shlex
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tmrun.core.errors import UsageError

TIMEOUT_S = 10.0
_QUEUE = 256
_SECRETS = ("TMRUN_SECRET", "TMRUN_ETCD_PASSWORD", "TMRUN_EVENT_URL")
ENV_EXEC, ENV_URL = "TMRUN_ON_EVENT", "TMRUN_EVENT_URL"


@dataclass(frozen=True, slots=True)
class Wanted:
    """``command``: split as a shell would, run without one; ``url``: http or https. Empty: none."""

    command: str = ""
    url: str = ""

    def check(self) -> None:
        """Raises UsageError; a URL may hold a token, so it is never repeated."""
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"--on-event {self.command!r}: {error}") from None
        if self.url and (urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname):
            raise UsageError(f"${ENV_URL} is no http:// or https:// address")


@dataclass
class Hooks:
    """Runs the hooks of one launcher. ``complain`` is called from the thread, once for each kind of trouble until it is over."""

    wanted: Wanted
    complain: Callable[[str], None]
    pids: set[int] = field(default_factory=set)
    """Programs that run now: children whose end is waited for here."""
    _queue: queue.Queue[dict[str, Any] | None] = field(default_factory=lambda: queue.Queue(_QUEUE))
    _thread: threading.Thread | None = None
    _said: str = ""

    def tell(self, event: dict[str, Any]) -> None:
        """Queue an event; when hooks are too slow the newest are dropped."""
        if not (self.wanted.command or self.wanted.url):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hooks", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._complain(f"hooks are too slow: events are dropped while {_QUEUE} wait")

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Let what is queued go out, for a while."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            body = json.dumps(event).encode()
            trouble = self._exec(body) if self.wanted.command else ""
            trouble = trouble or (self._post(body) if self.wanted.url else "")
            if trouble:
                self._complain(trouble)
            else:
                self._said = ""

    def _complain(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.complain(text)

    def _exec(self, body: bytes) -> str:
        env = {k: v for k, v in os.environ.items() if k not in _SECRETS}
        try:
            program = subprocess.Popen(shlex.split(self.wanted.command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
        except OSError as error:
            return f"event hook cannot be run: {error.strerror}"
        self.pids.add(program.pid)
        try:
            program.communicate(body, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            return f"event hook did not end within {TIMEOUT_S:g} s and was killed"
        finally:
            self.pids.discard(program.pid)
        return f"event hook ended with exit code {program.returncode}" if program.returncode else ""

    def _post(self, body: bytes) -> str:
        request = urllib.request.Request(self.wanted.url, body, {"Content-Type": "application/json", "User-Agent": "tmrun"})
        host = urlsplit(self.wanted.url).hostname
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            return f"event webhook at {host} answered {error.code}"
        except OSError as error:
            return f"event webhook at {host} does not answer: {getattr(error, 'reason', error)}"
        except (http.client.HTTPException, ValueError) as error:  # its text may hold the address
            return f"event webhook at {host} cannot be told: {type(error).__name__}"
