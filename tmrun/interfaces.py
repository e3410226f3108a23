"""Which network interface has an address, and which address an interface has: what gloo has to be told on a host whose name resolves to
something else.

May not know: who uses it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """Name of the interface with this IP address; None when there is none (a name, or another network namespace's)."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    if wanted.version == 6:
        return _interface6(wanted)
    if wanted.is_loopback:
        return "lo"
    return next((name for _, name in socket.if_nameindex() if _address4(name) == str(wanted)), None)


def address_of(interface: str) -> str | None:
    """The address of an interface: IPv4 if it has one, else IPv6, but none that needs a scope; None when there is none."""
    return _address4(interface) or _address6(interface)


def _address4(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # it has no IPv4 address
    return socket.inet_ntoa(reply[20:24])


def _address6(name: str) -> str | None:
    found = (ipaddress.IPv6Address(int(line.split()[0], 16)) for line in _lines6() if line.split()[-1] == name)
    return next((str(each) for each in found if not each.is_link_local), None)


def _interface6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    return next((line.split()[-1] for line in _lines6() if int(line.split()[0], 16) == int(wanted)), None)


def _lines6() -> list[str]:
    try:
        return Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
