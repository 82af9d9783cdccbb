"""What an address says of the machine behind it."""

from __future__ import annotations

import pytest

from swarmnode.wire.address import Address, home_of, is_loopback, reachable_here


@pytest.mark.parametrize(
    ("host", "home"),
    [
        ("192.0.2.9", "192.0.2.9"),
        ("::ffff:192.0.2.9", "192.0.2.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("relay", "relay"),
        ("", ""),
    ],
)
def test_homes(host: str, home: str) -> None:
    assert home_of(host) == home


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.com", "localhost.example.com", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_what_stands_for_all_addresses_is_reached_on_loopback() -> None:
    assert reachable_here(Address("0.0.0.0", 7700)) == Address("127.0.0.1", 7700)
    assert reachable_here(Address("::", 7700)) == Address("::1", 7700)
    assert reachable_here(Address("192.168.1.7", 1)) == Address("192.168.1.7", 1)
