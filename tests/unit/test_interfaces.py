"""Which interface has an address."""

from __future__ import annotations

import socket

import psutil
import pytest

from tmrun import interfaces
from tmrun.interfaces import address_of, interface_of


def own(family: socket.AddressFamily) -> list[tuple[str, str]]:
    """Name and first address of every interface that has one."""
    found = {name: [a.address.split("%")[0] for a in of if a.family is family] for name, of in psutil.net_if_addrs().items()}
    return [(name, addresses[0]) for name, addresses in found.items() if addresses]


def test_own_addresses() -> None:
    for name, address in [*own(socket.AF_INET), *own(socket.AF_INET6)]:
        assert interface_of(address) == name


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "127.255.0.1"])
def test_everything_that_begins_with_127_is_the_loopback(address: str) -> None:
    assert interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["", "localhost", "some.host", "203.0.113.7", "2001:db8::7", "127.0.0"])
def test_what_no_interface_here_has(address: str) -> None:
    assert interface_of(address) is None


def test_the_address_of_an_interface_is_its_first_ipv4_one() -> None:
    for name, address in own(socket.AF_INET):
        assert address_of(name) == address
    assert address_of("nosuch0") is None


def test_an_interface_without_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs a scope is no use to a peer."""
    lines = ["fe800000000000000000000000000001 02 40 20 80 six0", "20010db8000000000000000000000007 02 40 00 80 six0"]
    monkeypatch.setattr(interfaces, "_lines6", lambda: lines)
    assert address_of("six0") == "2001:db8::7"
    assert interface_of("2001:db8::7") == "six0"
    monkeypatch.setattr(interfaces, "_lines6", lambda: lines[:1])
    assert address_of("six0") is None
