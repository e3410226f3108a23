"""Which interface has an address."""

from __future__ import annotations

import socket

import psutil
import pytest

from tmrun.interfaces import interface_of


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
