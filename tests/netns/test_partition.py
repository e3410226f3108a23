"""Three hosts in network namespaces, three etcds with mutual TLS, and a cable that is pulled.

Needs root and iproute2; skipped, and said so, without. The namespaces and links belong to this test alone and are removed by it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_lab import DEADLINE_S, GPT, Lab, frozen, make_lab, wait_for

HOSTS = 3
PREFIX = f"tm{os.getpid() % 10000}"
SECRET = "0123456789abcdef-namespaces"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"{PREFIX}probe"], capture_output=True, check=False).returncode == 0
    if made:
        ip("netns", "del", f"{PREFIX}probe")
    return made


pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason="needs root and iproute2 to make network namespaces")


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Namespaces on one bridge: 10.77.0.1, .2, .3. Yields the names of the links' outer ends: down = cut off."""
    bridge, links = f"{PREFIX}br", [f"{PREFIX}v{i}" for i in range(1, HOSTS + 1)]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for i, link in enumerate(links, 1):
            space = f"{PREFIX}n{i}"
            ip("netns", "add", space)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", link, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield links
    finally:
        for i in range(1, HOSTS + 1):
            subprocess.run(["ip", "netns", "del", f"{PREFIX}n{i}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


class Hosts(Lab):
    """A lab whose launches and commands run inside the namespaces."""

    endpoints = ",".join(f"10.77.0.{i}:29400" for i in range(1, HOSTS + 1))

    def start(self, host: int) -> None:
        flags = ["--nnodes", "2", "--nproc-per-node", "1", "--standby", "1", "--lease-ttl", "4", "--job", "net", "--node-name", f"h{host}"]
        flags += ["--rdzv-endpoint", self.endpoints, "--etcd-members", "3"]
        script = [str(GPT), "--steps", "220", "--log-losses", str(self.losses)]
        log = self.folder / f"launch{host}.log"
        self.logs.append(log)
        argv = ["ip", "netns", "exec", f"{PREFIX}n{host}", sys.executable, "-m", "tmrun", *flags, *script]
        env = self.environment(TMRUN_SECRET=SECRET, TEST_PACE_S="1.0")
        with log.open("w") as out:
            self.launches.append(subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, text=True, env=env, cwd=self.folder))

    def status_at(self, host: int) -> dict[str, Any]:
        answer = self.cli_at(host, "status", "-o", "json")
        value: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
        return value

    def cli_at(self, host: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = ["ip", "netns", "exec", f"{PREFIX}n{host}", sys.executable, "-m", "tmrun", *arguments, "--etcd", self.endpoints]
        env = self.environment(TMRUN_SECRET=SECRET)
        return subprocess.run(argv, env=env, text=True, capture_output=True, timeout=DEADLINE_S, check=False)


def two_way(link: str, host: int, *, cut: bool) -> None:
    """The cable is out."""
    ip("link", "set", link, "down" if cut else "up")


def one_way(link: str, host: int, *, cut: bool) -> None:
    """Nothing that the host sends arrives anywhere; it still hears the others. (A queue that lets one byte a second pass.)"""
    argv = ["tc", "-n", f"{PREFIX}n{host}", "qdisc", "add" if cut else "del", "dev", "eth0", "root"]
    subprocess.run([*argv, *(["tbf", "rate", "8bit", "burst", "1", "latency", "1ms"] if cut else [])], check=True, capture_output=True)


def one_way_in(link: str, host: int, *, cut: bool) -> None:
    """It still sends, and hears nothing."""
    argv = ["tc", "qdisc", "add" if cut else "del", "dev", link, "root"]
    subprocess.run([*argv, *(["tbf", "rate", "8bit", "burst", "1", "latency", "1ms"] if cut else [])], check=True, capture_output=True)


def test_hosts_are_cut_off_with_their_etcds(network: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both ways, then one way, then the other way, then both ways while no etcd answers, for longer than a lease lives: the others keep a
    quorum, the standby takes over; the lost host stops its workers, ends them when the link is back, and is a standby again."""
    plain = make_lab(tmp_path_factory.mktemp("net"))
    lab = Hosts(plain.folder)
    try:
        for host in range(1, HOSTS + 1):
            lab.start(host)
        for epoch, cable, away_s in ((2, two_way, 0.0), (3, one_way, 0.0), (4, one_way_in, 0.0), (5, two_way, 6.0)):
            before = wait_for("a warm standby", lambda: ready(lab, 1))
            victim = next(i for i in (2, 3) if nodes_of(before)[f"h{i}"]["role"] == "active")
            pids = nodes_of(before)[f"h{victim}"]["pids"]
            healthy = 5 - victim
            with frozen([pid for i in range(HOSTS) for pid in lab.etcds(i)], away_s):
                cable(network[victim - 1], victim, cut=True)
            try:
                wait_for("the ranks have moved", lambda h=healthy, e=epoch: at(lab, h, e))
            finally:
                cable(network[victim - 1], victim, cut=False)
            wait_for("the lost host ended its workers", lambda p=pids: not lab.living(p))
            wait_for("it is back", lambda h=healthy, v=victim: nodes_of(lab.status_at(h)).get(f"h{v}", {}).get("state") == "standby")
        lab.go_fast()
        assert [launch.wait(DEADLINE_S) for launch in lab.launches] == [0, 0, 0]
        printed = "".join(lab.output(i) for i in range(HOSTS))
        assert printed.count("final parameters sha256") == 1
        assert "its workers wait with their state for the store" in printed
    except BaseException:
        for index in range(len(lab.logs)):
            print(f"--- host {index + 1}\n{lab.output(index)}")
        raise
    finally:
        lab.close()


def nodes_of(status: dict[str, Any]) -> dict[str, Any]:
    return {n["name"]: n for n in status.get("nodes", ())}


def ready(lab: Hosts, host: int) -> dict[str, Any] | None:
    value = lab.status_at(host)
    return value if value and value["standby"]["warm"] == 1 and (value["step"] or 0) >= 3 else None


def at(lab: Hosts, host: int, epoch: int) -> bool:
    value = lab.status_at(host)
    return bool(value) and value["epoch"] == epoch and value["state"] == "running"
