"""Somebody is about to take this machine away: hears of it, from whatever source, and says so to the loop.

    a file exists                    its text is the reason
    a command ends with 0            its output is the reason
    a URL answers 200                its text is the reason (a cloud's metadata service; 404 while nothing is planned)
    Kubernetes: the node is cordoned or has a NoSchedule or NoExecute taint   read from the API server

Every source is asked each ``ASK_EVERY_S``; one that fails says nothing, and that is told once. A notice can be taken back.
May not know: what follows from a notice.
"""

from __future__ import annotations

import http.client
import json
import shlex
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tmrun.config import NoticeSources

ASK_EVERY_S = 1.0
_TIMEOUT_S = 2.0
_MAX_TEXT = 200
_TAINTS = ("NoSchedule", "NoExecute")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Source = Callable[[], str]
"""The reason why this machine goes away, empty: it stays. Raises OSError, ValueError."""


@dataclass(frozen=True, slots=True)
class GoesAway:
    """This machine goes away; empty reason: it stays after all."""

    reason: str


def from_file(path: Path) -> Source:
    """The file's existence."""

    def ask() -> str:
        try:
            return _short(path.read_text()) or "announced"
        except FileNotFoundError:
            return ""

    return ask


def from_command(command: str) -> Source:
    """A command's success; it is run without a shell."""
    argv = shlex.split(command)

    def ask() -> str:
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False)
        except subprocess.TimeoutExpired:
            raise OSError(f"{command!r} did not end within 10 s") from None
        return (_short(done.stdout) or "announced") if done.returncode == 0 else ""

    return ask


def from_url(url: str) -> Source:
    """Status 200; 404 and 204 mean that nothing is planned."""

    def ask() -> str:
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                return (_short(answer.read(4096).decode(errors="replace")) or "announced") if answer.status == 200 else ""
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise

    return ask


def from_kubernetes(node: str, server: str, account: Path = _ACCOUNT) -> Source:
    """Cordon and taints of a node. ``server``: https://host:port of the API; the pod's service account needs ``get nodes``."""

    def ask() -> str:
        request = urllib.request.Request(f"{server}/api/v1/nodes/{node}")
        context = None
        if (account / "token").exists():
            request.add_header("Authorization", f"Bearer {(account / 'token').read_text().strip()}")
        if server.startswith("https:"):
            context = ssl.create_default_context(cafile=str(account / "ca.crt") if (account / "ca.crt").exists() else None)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:
            return _kubernetes_reason(json.load(answer))

    return ask


def _kubernetes_reason(node: dict[str, object]) -> str:
    spec = node.get("spec")
    if not isinstance(spec, dict):
        raise ValueError("the API server's answer is no node")
    taints = [t for t in spec.get("taints") or () if t.get("effect") in _TAINTS and t.get("key") != "node.kubernetes.io/unschedulable"]
    if taints:
        return f"Kubernetes taint {taints[0].get('key')}:{taints[0].get('effect')}"
    return "Kubernetes node is cordoned" if spec.get("unschedulable") else ""


def sources(wanted: NoticeSources) -> list[Source]:
    """Of an agent's configuration."""
    found = [from_file(Path(p)) for p in wanted.files]
    found += [from_command(c) for c in wanted.commands]
    found += [from_url(u) for u in wanted.urls]
    if wanted.kubernetes_node:
        found.append(from_kubernetes(wanted.kubernetes_node, wanted.kubernetes_server))
    return found


def _short(text: str) -> str:
    return " ".join(text.split())[:_MAX_TEXT]


@dataclass
class Notices:
    """``leaving`` is called from the asking thread when the answer changes, ``tell`` with a line about a source that fails."""

    sources: Sequence[Source]
    leaving: Callable[[GoesAway], None]
    tell: Callable[[str], None]
    _reason: str = ""
    _failing: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._run, name="notices", daemon=True).start()

    def _run(self) -> None:
        while True:
            reason = self.ask()
            if reason is not None and reason != self._reason:
                self._reason = reason
                self.leaving(GoesAway(reason))
            time.sleep(ASK_EVERY_S)

    def ask(self) -> str | None:
        """One round; None: a source failed and no other has a reason, so nothing is known."""
        unknown = False
        for number, source in enumerate(self.sources):
            try:
                reason = source()
            except (OSError, ValueError, http.client.HTTPException) as error:
                if number not in self._failing:
                    self.tell(f"a source of preemption notices fails: {error}")
                self._failing.add(number)
                unknown = True
                continue
            self._failing.discard(number)
            if reason:
                return reason
        return None if unknown else ""
