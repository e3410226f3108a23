"""Hosts with a network of their own: a namespace, an address and a hostname each, one bridge between them. Needs root and iproute2.

``cut`` pulls a host's cable: neither side is told. ``mbit`` limits what every host sends (token bucket).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HOSTS = Path("/etc/netns")
"""iproute2 shows a namespace's files below it in place of those in /etc."""


def possible() -> bool:
    """Whether this process may make namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return False
    name = f"bnprobe{os.getpid() % 10000}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _run("ip", "netns", "del", name)
    return made


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)


@dataclass
class Network:
    """One trial's network; ``prefix``: of everything it makes, at most 8 characters."""

    prefix: str
    names: Sequence[str]
    mbit: int = 0

    def address(self, name: str) -> str:
        """Its address on the bridge."""
        return f"10.78.0.{self.names.index(name) + 1}"

    def _space(self, name: str) -> str:
        return f"{self.prefix}n{self.names.index(name)}"

    def _link(self, name: str) -> str:
        return f"{self.prefix}v{self.names.index(name)}"

    def open(self) -> None:
        """Make it. Raises CalledProcessError."""
        _run("ip", "link", "add", f"{self.prefix}br", "type", "bridge")
        _run("ip", "link", "set", f"{self.prefix}br", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(f"{self.address(n)} {n}\n" for n in self.names)
        for name in self.names:
            space, link = self._space(name), self._link(name)
            (_HOSTS / space).mkdir(parents=True, exist_ok=True)
            (_HOSTS / space / "hosts").write_text(hosts)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", link, "master", f"{self.prefix}br", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            if self.mbit:
                limit = ("tbf", "rate", f"{self.mbit}mbit", "burst", "256kb", "latency", "50ms")
                _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *limit)

    def inside(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on that host; the process keeps its pid."""
        named = ["sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", name]
        return ["ip", "netns", "exec", self._space(name), "unshare", "--uts", "--", *named, *argv]

    def cut(self, name: str) -> None:
        """Pull the host's cable."""
        _run("ip", "link", "set", self._link(name), "down")

    def close(self) -> None:
        """Remove all of it, also what is left of an earlier one with this prefix."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True, check=False)
            shutil.rmtree(_HOSTS / self._space(name), ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"{self.prefix}br"], capture_output=True, check=False)
        if _HOSTS.exists() and not any(_HOSTS.iterdir()):
            _HOSTS.rmdir()
