"""Three hosts in network namespaces, three etcds with mutual TLS, and a cable that is pulled.

Needs root and iproute2; skipped, and said so, without. The namespaces and links belong to this test alone and are removed by it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_lab import DEADLINE_S, GPT, STEPS, Lab, make_lab, wait_for

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
        script = [str(GPT), "--steps", str(STEPS), "--log-losses", str(self.losses)]
        log = self.folder / f"launch{host}.log"
        self.logs.append(log)
        argv = ["ip", "netns", "exec", f"{PREFIX}n{host}", sys.executable, "-m", "tmrun", *flags, *script]
        env = self.environment(TMRUN_SECRET=SECRET)
        with log.open("w") as out:
            self.launches.append(subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, text=True, env=env, cwd=self.folder))

    def cli_at(self, host: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = ["ip", "netns", "exec", f"{PREFIX}n{host}", sys.executable, "-m", "tmrun", *arguments, "--etcd", self.endpoints]
        env = self.environment(TMRUN_SECRET=SECRET)
        return subprocess.run(argv, env=env, text=True, capture_output=True, timeout=DEADLINE_S, check=False)


def test_a_host_is_cut_off_with_its_etcd(network: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The other two keep a quorum, the standby takes over; the lost host fences itself, and is a standby again when the cable is back."""
    import json

    plain = make_lab(tmp_path_factory.mktemp("net"))
    lab = Hosts(plain.folder)
    try:
        for host in range(1, HOSTS + 1):
            lab.start(host)

        def status(host: int) -> dict[str, object]:
            answer = lab.cli_at(host, "status", "-o", "json")
            value: dict[str, object] = json.loads(answer.stdout) if answer.returncode == 0 else {}
            return value

        def ready() -> dict[str, object] | None:
            value = status(1)
            warm = bool(value) and value["standby"]["warm"] == 1 and (value["step"] or 0) >= 3  # type: ignore[index,operator]
            return value if warm else None

        before = wait_for("a warm standby", ready)
        nodes = {n["name"]: n for n in before["nodes"]}
        victim = 2 if nodes["h2"]["role"] == "active" else 3
        pids = nodes[f"h{victim}"]["pids"]
        ip("link", "set", network[victim - 1], "down")
        healthy = next(h for h in (1, 2, 3) if h != victim)
        wait_for("the ranks have moved", lambda: status(healthy).get("epoch") == 2 and status(healthy).get("state") == "running")
        wait_for("the lost host ended its workers", lambda: not any(Path(f"/proc/{p}").exists() for p in pids))
        ip("link", "set", network[victim - 1], "up")

        def back() -> bool:
            states = {n["name"]: n["state"] for n in status(healthy).get("nodes", [])}  # type: ignore[attr-defined]
            return states.get(f"h{victim}") in ("warming", "standby")

        wait_for("it is back", back)
        lab.go_fast()
        assert [launch.wait(DEADLINE_S) for launch in lab.launches] == [0, 0, 0]
        printed = "".join(lab.output(i) for i in range(HOSTS))
        assert printed.count("final parameters sha256") == 1
    except BaseException:
        for index in range(len(lab.logs)):
            print(f"--- host {index + 1}\n{lab.output(index)}")
        raise
    finally:
        lab.close()
