"""Where an etcd is and how it is secured, parsed from what a user typed.

May not know: gRPC (importing this must stay cheap), what is stored there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tmrun.core.errors import UsageError

DEFAULT_PORT = 2379


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. No ``ca``: the system's roots. ``cert`` and ``key`` together: mutual TLS."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise UsageError("a TLS client certificate needs its key, and the key its certificate: give both or neither")
        for path in (self.ca, self.cert, self.key):
            if path is not None and not Path(path).is_file():
                raise UsageError(f"no TLS file at {path}: check the path")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Members of one etcd cluster: ``host:port`` each, all of them with TLS or none."""

    addresses: tuple[str, ...]
    tls: bool = False


def endpoints(given: str | Sequence[str]) -> Endpoints:
    """Parse ``http://h:2379,https://h2:2379`` (scheme and port optional), or a sequence of such."""
    text = given if isinstance(given, str) else ",".join(given)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("no etcd endpoint given: write host:port, or several separated by commas")
    parsed = [_endpoint(part) for part in parts]
    if len({tls for _, tls in parsed}) > 1:
        raise UsageError(f"etcd endpoints mix http and https: {text!r}; use one scheme for all members")
    return Endpoints(tuple(dict.fromkeys(address for address, _ in parsed)), parsed[0][1])


def _endpoint(part: str) -> tuple[str, bool]:
    scheme, separator, rest = part.partition("://")
    if not separator:
        scheme, rest = "http", part
    if scheme not in ("http", "https"):
        raise UsageError(f"etcd endpoint {part!r} has the scheme {scheme!r}: use http or https")
    try:
        url = urlsplit(f"//{rest}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise UsageError(f"etcd endpoint {part!r} is not host:port ({error}); IPv6 addresses need brackets: [::1]:2379") from None
    if url.username is not None or url.path not in ("", "/") or url.query or url.fragment:
        raise UsageError(f"etcd endpoint {part!r} has more than a host and a port: give user, password and prefix by their own options")
    if not host or any(c.isspace() for c in host) or port == 0:
        raise UsageError(f"etcd endpoint {part!r} has no usable host and port: write host:port")
    if rest.count(":") > 1 and not rest.startswith("["):
        raise UsageError(f"etcd endpoint {part!r} is ambiguous: IPv6 addresses need brackets: [::1]:2379")
    return f"{bracketed(host)}:{port or DEFAULT_PORT}", scheme == "https"


def bracketed(host: str) -> str:
    """The host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
