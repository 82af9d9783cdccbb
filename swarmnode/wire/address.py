"""Addresses of nodes: HOST:PORT as text and as a value, the usual ports, and what an address says of its machine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from swarmnode.errors import InvalidRequest

SWARM_LISTEN = "127.0.0.1:7700"
API_LISTEN = "127.0.0.1:7701"
"""Where a coordinator listens unless it is told otherwise."""
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that stand for all of a machine's addresses, and the one of them that reaches it from within."""
HOME_PREFIX = 64
"""Bits of an IPv6 address that its home has; the rest a machine chooses as it likes."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ApiUrl:
    """A coordinator's API port as others reach it, perhaps through a tunnel or a proxy: links to it are polled."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def address(self) -> Address:
        """What a connection to it goes to."""
        url = urlsplit(self.text)
        return Address(url.hostname or "", url.port or (443 if url.scheme == "https" else 80))


Place = Address | ApiUrl
"""Where a coordinator answers."""


def parse_place(text: str) -> Place:
    """HOST:PORT, or the URL of an API port; raises InvalidRequest that names the text."""
    if "://" not in text:
        return parse_address(text)
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.username or url.query or url.fragment:
        raise InvalidRequest(f"{text[:120]!r} is not HOST:PORT and not http(s)://HOST[:PORT]")
    try:
        _ = url.port
    except ValueError:
        raise InvalidRequest(f"{text[:120]!r} has a port that is none") from None
    return ApiUrl(text.rstrip("/"))


def parse_address(text: str) -> Address:
    """HOST:PORT or [IPV6]:PORT; raises InvalidRequest that names the text."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise InvalidRequest(f"address {text[:120]!r} is not HOST:PORT with a port of 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidRequest(f"address {text[:120]!r}: write an IPv6 address in brackets, [::1]:4000")
    return Address(host, int(port))


def reachable_here(bound: Address) -> Address:
    """What a program on this machine dials to reach a port that is bound there."""
    return Address(WILDCARDS.get(bound.host, bound.host), bound.port)


def is_loopback(host: str) -> bool:
    """Whether a numeric address, or `localhost`, is this machine alone."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def home_of(host: str) -> str:
    """The home that connections from `host` are counted for: of IPv6 the network, since it gives a machine as many
    addresses as it wants."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address) and not ip.ipv4_mapped and not ip.is_loopback:
        return str(ipaddress.ip_network((ip, HOME_PREFIX), strict=False))
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def require_loopback(address: Address) -> Address:
    """The address with `localhost` resolved; raises InvalidRequest for one that other machines could reach."""
    if address.host == "localhost":
        return Address("127.0.0.1", address.port)
    if not is_loopback(address.host):
        raise InvalidRequest(
            f"swarm address {address} is not a loopback address: without certificates nothing is encrypted or proved, "
            "so such a link stays on 127.0.0.1, ::1 or localhost"
        )
    return address
