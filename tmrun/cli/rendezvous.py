"""torchrun's many ways to say where nodes meet, as one answer: alone here, an etcd that runs, or a store that a host runs for us.

May not know: stores, how many workers there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tmrun.cli.flags import Flags
from tmrun.cli.place import split_endpoint
from tmrun.core.errors import UsageError

_MASTER_PORT = 29500
_ETCD = ("etcd", "etcd-v2")
_USED = ("join_timeout", "last_call_timeout", "timeout", "protocol", "cacert", "cert", "key")


@dataclass(frozen=True, slots=True)
class Meeting:
    """``etcd``: URLs of one that runs; ``hosts``: who runs the store; neither: this machine alone. ``master_port`` 0: any."""

    etcd: str = ""
    hosts: tuple[tuple[str, int], ...] = ()
    master_port: int = 0
    conf: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether no other host takes part."""
        return not self.etcd and not self.hosts

    def seconds(self, key: str) -> float | None:
        """A duration from --rdzv-conf. Raises UsageError."""
        if key not in self.conf:
            return None
        try:
            return float(self.conf[key])
        except ValueError:
            raise UsageError(f"--rdzv-conf {key}={self.conf[key]}: expected seconds") from None


def meeting(flags: Flags, nodes: int, spares: int) -> Meeting:
    """``nodes``: what --nnodes asks for at least. ``spares``: standbys beyond it; they run on this machine too where only one node is asked
    for and no place to meet is named. Raises UsageError."""
    if flags.rdzv_backend not in ("static", "c10d", *_ETCD):
        raise UsageError(f"--rdzv-backend {flags.rdzv_backend!r}: use static, c10d, etcd or etcd-v2; others are plugins of torchrun")
    conf = parse_conf(flags.rdzv_conf)
    unused = [key for key in conf if key not in _USED]
    notes = (f"--rdzv-conf {', '.join(unused)}: has no effect here",) if unused else ()
    port = flags.master_port or 0
    if flags.standalone or (flags.local_nodes and not flags.etcd and not flags.rdzv_endpoint):
        return Meeting("", (), port, conf, notes)
    if flags.rdzv_backend in _ETCD or flags.etcd:
        return Meeting(_etcd_url(flags, conf), (), port, conf, notes)
    hosts = _hosts(flags, nodes, spares)
    if not flags.rdzv_endpoint and hosts:
        port = hosts[0][1] - 1
    return Meeting("", hosts, port, conf, notes)


def _etcd_url(flags: Flags, conf: dict[str, str]) -> str:
    if flags.etcd:
        if flags.rdzv_endpoint:
            raise UsageError("--etcd and --rdzv-endpoint exclude each other: the first names a running etcd, the second starts one")
        return flags.etcd
    if not flags.rdzv_endpoint:
        raise UsageError(f"--rdzv-backend {flags.rdzv_backend} needs --rdzv-endpoint HOST:PORT, an etcd that runs")
    scheme = conf.get("protocol", "https" if "cacert" in conf else "http")
    return ",".join(part if "://" in part else f"{scheme}://{part}" for part in flags.rdzv_endpoint.split(","))


def _hosts(flags: Flags, nodes: int, spares: int) -> tuple[tuple[str, int], ...]:
    """Who runs the store; nobody but this machine where no other takes part."""
    named = bool(flags.master_addr) or (bool(flags.rdzv_endpoint) and not flags.rdzv_endpoint.endswith(":0"))
    more = spares and (named or flags.standby is None)  # --nnodes 1:3 is several hosts' in any case
    if nodes == 1 and not more and flags.node_rank in (None, 0):
        return ()
    if not flags.rdzv_endpoint:
        if flags.rdzv_backend == "c10d":
            return (split_endpoint("localhost"),)
        host, _ = split_endpoint(flags.master_addr or "127.0.0.1")
        return ((host, (flags.master_port or _MASTER_PORT) + 1),)
    if any(part.endswith(":0") for part in flags.rdzv_endpoint.split(",")):
        raise UsageError(f"--rdzv-endpoint {flags.rdzv_endpoint}: the other nodes cannot know a random port; name one")
    return tuple(split_endpoint(part) for part in flags.rdzv_endpoint.split(","))


def parse_conf(text: str) -> dict[str, str]:
    """``k=v,k=v`` -> pairs; also in quotes that no shell took away. Raises UsageError."""
    pairs, text = {}, text.strip().strip("'\"")
    for part in text.split(",") if text else ():
        key, separator, value = part.partition("=")
        if not separator or not key.strip():
            raise UsageError(f"--rdzv-conf {part!r}: expected KEY=VALUE[,KEY=VALUE]")
        pairs[key.strip()] = value.strip()
    return pairs
