"""What ``tmrun doctor`` makes of what it found: facts about a store and a host -> one line a check.

The thresholds are here and nowhere else. May not know: how the facts were gathered, how the lines are printed.

Clocks are not checked: nothing is decided by comparing two machines' clocks. Leases run on the store's clock alone, fences on each
agent's own (CLOCK_BOOTTIME), so an offset between hosts cannot do harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tmrun.core.plural import many

API_VERSION = 1

SAFE_ETCD = (3, 5, 13)
"""Older clusters can revoke live leases when a paused leader resumes (seen with 3.4.23 in three of five trials)."""
SLOW_S = {"put": 0.05, "transaction": 0.05, "keep-alive": 0.1}
"""Medians above which a check warns. A healthy etcd on one network answers in 1-10 ms; ten times these are bad: a lease of 6 s is renewed
every 1.2 s, and a switch waits for about ten transactions in a row."""
BAD_FACTOR = 10
DB_WARN_SHARE = 0.6
"""Of the quota; at the quota etcd refuses all writes (NOSPACE)."""
FILES_WARN = 4096
"""An agent needs few files, training many (data loaders, sockets); the store of a job of N nodes needs about 3 N."""
SHM_WARN_MB = 256
EXPIRY_WARN_DAYS = 14.0
OLDEST_TORCH = (2, 10)


class Grade(str, Enum):
    """Exit codes: ok 0, warn 1, bad 2."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: a stable code, what was found, what to do about it."""

    code: str
    grade: Grade
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Server:
    """One endpoint as it answered. ``error``: why it did not; then the rest is empty."""

    address: str
    error: str = ""
    version: str = ""
    leader: bool = False
    has_leader: bool = True
    db_bytes: int = 0
    quota_bytes: int = 0
    """0: it does not tell."""
    denied: bool = False
    """It answered, but not to this user."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What was found out about a store. ``latency_s``: kind of request -> samples."""

    servers: tuple[Server, ...]
    bundled: bool = False
    """Run by tmrun itself for one job."""
    members: int = 0
    alarms: tuple[str, ...] = ()
    auth: bool | None = None
    user: str = ""
    refused: str = ""
    """Why this user may not write or read below the prefix of tmrun; empty: it may."""
    latency_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    tls_days: dict[str, float] = field(default_factory=dict)
    """PEM file -> days until it expires."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was found out about this host."""

    hostname: str
    address: str = ""
    """The one that routes to the store; empty: no store was given, or no route."""
    no_route: str = ""
    interface: str = ""
    resolved: tuple[str, ...] = ()
    """What the host's own name resolves to."""
    files: int = 0
    torch: str = ""
    backends: tuple[str, ...] = ()
    gpus: int = 0
    compiler: str = ""
    shm_mb: int = 0


def exit_code(checks: Iterable[Check]) -> int:
    """0 all well, 1 warnings, 2 something is bad."""
    grades = {c.grade for c in checks}
    return 2 if Grade.BAD in grades else 1 if Grade.WARN in grades else 0


def store_checks(facts: StoreFacts) -> list[Check]:
    """All lines about the store."""
    checks = [_server(s, facts) for s in facts.servers]
    up = [s for s in facts.servers if not s.error]
    if not up:
        return checks
    checks += [_members(facts), _auth(facts)]
    checks += [_latency(kind, samples) for kind, samples in facts.latency_s.items()]
    checks += [_database(s) for s in up]
    checks += [_alarm(a) for a in facts.alarms]
    checks += [_expiry(path, days) for path, days in facts.tls_days.items()]
    checks.append(Check("CLOCKS", Grade.OK, "clock offsets between hosts do not matter: only leases decide who is alive"))
    return checks


def _server(server: Server, facts: StoreFacts) -> Check:
    what = f"etcd at {server.address}"
    if server.denied:
        return Check("ETCD_LOGIN", Grade.BAD, server.error, "set TMRUN_ETCD_USER and TMRUN_ETCD_PASSWORD to a user of this etcd")
    if server.error:
        everywhere = all(s.error for s in facts.servers)
        return Check("ETCD_UNREACHABLE", Grade.BAD if everywhere else Grade.WARN, f"{what}: {server.error}", "start it, or check the route")
    what += f", version {server.version}{', leader' if server.leader else ''}"
    if not server.has_leader:
        return Check("ETCD_NO_LEADER", Grade.BAD, f"{what}: its cluster has no leader", "start the other members: a majority is needed")
    if _version(server.version) < SAFE_ETCD and not (facts.bundled and facts.members <= 1):
        known = "a paused leader that resumes can revoke live leases"
        return Check("ETCD_KNOWN_BUG", Grade.WARN, f"{what}: {known}", f"upgrade to {'.'.join(map(str, SAFE_ETCD))} or later")
    return Check("ETCD", Grade.OK, what)


def _version(text: str) -> tuple[int, ...]:
    numbers = text.partition("-")[0].split(".")
    return tuple(int(n) for n in numbers if n.isdigit())


def _members(facts: StoreFacts) -> Check:
    count = facts.members
    if facts.bundled or count >= 3:
        return Check("ETCD_MEMBERS", Grade.OK, f"{many(count, 'member')}, survives the loss of {(count - 1) // 2}")
    return Check("ETCD_MEMBERS", Grade.WARN, f"{many(count, 'member')}: survives the loss of none", "run three, or accept that risk")


def _auth(facts: StoreFacts) -> Check:
    who = f"user {facts.user!r}" if facts.user else "anybody"
    if facts.refused:
        advice = "grant the user read and write below /tmrun/" if facts.user else "set TMRUN_ETCD_USER and TMRUN_ETCD_PASSWORD"
        return Check("ETCD_PERMISSION", Grade.BAD, f"{who} may not read and write below /tmrun/: {facts.refused}", advice)
    state = {True: "on", False: "off", None: "unknown"}[facts.auth]
    return Check("ETCD_AUTH", Grade.OK, f"authentication is {state}; {who} may read and write below /tmrun/")


def _latency(kind: str, samples: Sequence[float]) -> Check:
    code = f"LATENCY_{kind.upper().replace('-', '_')}"
    median, most = sorted(samples)[len(samples) // 2], max(samples)
    what = f"{kind}: median {median * 1e3:.1f} ms, slowest of {len(samples)} {most * 1e3:.1f} ms"
    limit = SLOW_S[kind]
    if median <= limit:
        return Check(code, Grade.OK, what)
    advice = f"expected below {limit * 1e3:.0f} ms: look at the store's disk, CPU and network"
    return Check(code, Grade.BAD if median > BAD_FACTOR * limit else Grade.WARN, what, advice)


def _database(server: Server) -> Check:
    size = f"database at {server.address}: {server.db_bytes / 2**20:.0f} MiB"
    if not server.quota_bytes:
        return Check("ETCD_DATABASE", Grade.OK, f"{size} (it does not tell its quota)")
    share = server.db_bytes / server.quota_bytes
    what = f"{size} of {server.quota_bytes / 2**20:.0f} MiB"
    if share < DB_WARN_SHARE:
        return Check("ETCD_DATABASE", Grade.OK, what)
    return Check(
        "ETCD_DATABASE", Grade.BAD if share > 0.95 else Grade.WARN, what, "compact and defragment it, or raise --quota-backend-bytes"
    )


def _alarm(name: str) -> Check:
    advice = "compact, defragment, then `etcdctl alarm disarm`" if name == "NOSPACE" else "replace the damaged member"
    return Check(f"ETCD_ALARM_{name}", Grade.BAD, f"etcd has raised the alarm {name}: it refuses writes", advice)


def _expiry(path: str, days: float) -> Check:
    if days > EXPIRY_WARN_DAYS:
        return Check("TLS_EXPIRY", Grade.OK, f"{path} is valid for {many(round(days), 'more day')}")
    if days <= 0:
        return Check("TLS_EXPIRY", Grade.BAD, f"{path} expired {many(round(-days), 'day')} ago", "issue another one")
    return Check("TLS_EXPIRY", Grade.WARN, f"{path} expires in {many(round(days), 'day')}", "renew it before the job outlives it")


def host_checks(facts: HostFacts) -> list[Check]:
    """All lines about this host."""
    return [*_route(facts), _name(facts), _files(facts), _torch(facts), _compiler(facts), _shm(facts)]


def _route(facts: HostFacts) -> list[Check]:
    if facts.no_route:
        return [Check("ADDRESS", Grade.BAD, facts.no_route, "give this host's address with --local-addr")]
    if not facts.address:
        return [Check("ADDRESS", Grade.OK, "no store given, so no address to choose")]
    found = [Check("ADDRESS", Grade.OK, f"this host reaches the store from {facts.address}; other hosts are told this address")]
    if facts.interface:
        return [*found, Check("INTERFACE", Grade.OK, f"gloo will use {facts.interface} (GLOO_SOCKET_IFNAME overrides)")]
    advice = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    return [*found, Check("INTERFACE", Grade.WARN, f"no interface here has the address {facts.address}", advice)]


def _name(facts: HostFacts) -> Check:
    name = facts.hostname
    if not facts.resolved:
        return Check("HOSTNAME", Grade.WARN, f"{name} does not resolve", "add it to /etc/hosts; some libraries ask for it")
    shown = ", ".join(facts.resolved)
    local = facts.address.startswith("127.") or facts.address in ("", "::1")
    if not local and all(a.startswith("127.") or a == "::1" for a in facts.resolved):
        what = f"{name} resolves to {shown} only: a library that binds to it is deaf to other hosts"
        return Check("HOSTNAME", Grade.WARN, what, "tmrun goes by addresses; set GLOO_SOCKET_IFNAME for your own process groups")
    if not local and facts.address not in facts.resolved:
        what = f"{name} resolves to {shown}, not to {facts.address}"
        return Check("HOSTNAME", Grade.OK, f"{what}; tmrun goes by addresses")
    return Check("HOSTNAME", Grade.OK, f"{name} resolves to {shown}")


def _files(facts: HostFacts) -> Check:
    if facts.files >= FILES_WARN:
        return Check("OPEN_FILES", Grade.OK, f"up to {facts.files} open files")
    return Check("OPEN_FILES", Grade.WARN, f"only {facts.files} open files", f"raise `ulimit -n` to {FILES_WARN} or more")


def _torch(facts: HostFacts) -> Check:
    if not facts.torch:
        return Check("TORCH", Grade.BAD, "torch is not installed here", "install torch in this environment")
    what = f"torch {facts.torch}, backends {', '.join(facts.backends) or 'none'}, {many(facts.gpus, 'GPU')}"
    if _version(facts.torch.partition("+")[0]) < OLDEST_TORCH:
        return Check("TORCH", Grade.BAD, what, f"tmrun needs torch {'.'.join(map(str, OLDEST_TORCH))} or later")
    if "gloo" not in facts.backends:
        return Check("TORCH", Grade.BAD, what, "tmrun needs the gloo backend for its own messages")
    if facts.gpus and "nccl" not in facts.backends:
        return Check("TORCH", Grade.WARN, what, "there are GPUs, but this torch was built without NCCL")
    return Check("TORCH", Grade.OK, what)


def _compiler(facts: HostFacts) -> Check:
    if facts.compiler:
        return Check("COMPILER", Grade.OK, f"C++ compiler {facts.compiler} (for the optional switch)")
    return Check("COMPILER", Grade.OK, "no C++ compiler: the optional C++ switch cannot be built, tmrun works without")


def _shm(facts: HostFacts) -> Check:
    if facts.shm_mb >= SHM_WARN_MB:
        return Check("SHM", Grade.OK, f"/dev/shm has {facts.shm_mb} MiB")
    advice = "in a container: --shm-size=8g, or --ipc=host"
    return Check("SHM", Grade.WARN, f"/dev/shm has only {facts.shm_mb} MiB: data loaders and NCCL need more", advice)
