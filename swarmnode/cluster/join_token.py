"""The one line that lets a machine join: which swarm, where it answers, and a secret it takes once.

    swn1.<hash of the CA certificate>.<addresses>.<id>.<secret>.<checksum>

Every field is base64url without padding, so that the line has no character a shell or a chat program would touch. The
checksum is for people's fingers; what proves anything is the hash, which the joiner checks before it sends the secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX = "swn"
VERSION = 1
HASH_BYTES = 32
ID_BYTES = 8
SECRET_BYTES = 32
"""256 bits: no budget of guesses comes near it, and its plain SHA-256 may be stored."""
CHECKSUM_BYTES = 6
MAX_ADDRESSES = 8
MAX_ADDRESS_CHARS = 128
MAX_TOKEN_CHARS = 2048
"""Eight of the longest addresses fit; anything beyond is no token."""
_FIELDS = 6


@dataclass(frozen=True, slots=True)
class JoinToken:
    """`ca_hash` is SHA-256 of the CA certificate's DER form; `id` names the secret at the coordinator."""

    ca_hash: bytes
    addresses: tuple[str, ...]
    id: bytes
    secret: bytes

    def __post_init__(self) -> None:
        sizes = ((self.ca_hash, HASH_BYTES), (self.id, ID_BYTES), (self.secret, SECRET_BYTES))
        if any(len(value) != size for value, size in sizes):
            raise InvalidRequest("a join token's hash, id or secret has the wrong length; make a new one")
        _check_addresses(self.addresses)

    def __repr__(self) -> str:
        """Without the secret: a token may end up in a log or a traceback."""
        return f"JoinToken(id={self.id.hex()}, addresses={self.addresses})"


def format_join_token(token: JoinToken) -> str:
    addresses = ",".join(token.addresses).encode("ascii")
    fields = (f"{PREFIX}{VERSION}", *map(_encode, (token.ca_hash, addresses, token.id, token.secret)))
    line = ".".join(fields)
    return f"{line}.{_checksum(line)}"


def parse_join_token(text: str) -> JoinToken:
    """Raises InvalidRequest that says what is wrong with the line: not a token, a newer one, cut short, mistyped."""
    line = text.strip()
    if len(line) > MAX_TOKEN_CHARS:
        raise InvalidRequest(f"a join token has at most {MAX_TOKEN_CHARS} characters; this has {len(line)}")
    parts = line.split(".")
    _check_version(parts[0])
    if len(parts) != _FIELDS:
        raise InvalidRequest(f"the join token has {len(parts)} parts, not {_FIELDS}; copy the whole line")
    if _checksum(line.rpartition(".")[0]) != parts[-1]:
        raise InvalidRequest("the join token's checksum is wrong: a character was changed or lost; copy it again")
    ca_hash, addresses, token_id, secret = (_decode(part) for part in parts[1:5])
    return JoinToken(ca_hash, _read_addresses(addresses), token_id, secret)


def _check_version(prefix: str) -> None:
    number = prefix.removeprefix(PREFIX)
    if number == prefix or not (number.isascii() and number.isdigit()):
        raise InvalidRequest(f"a join token begins with {PREFIX}{VERSION}.; `swarmnode join-token` prints one")
    if number != str(VERSION):
        newer = len(number) > len(str(VERSION)) or int(number[:9]) > VERSION
        advice = "update swarmnode on this machine" if newer else "make a new one on the coordinator"
        raise InvalidRequest(f"the join token has version {number[:9]}, this program reads {VERSION}; {advice}")


def _check_addresses(addresses: Sequence[str]) -> None:
    if not 1 <= len(addresses) <= MAX_ADDRESSES:
        raise InvalidRequest(f"a join token holds 1 to {MAX_ADDRESSES} addresses, not {len(addresses)}")
    for address in addresses:
        printable = address.isascii() and address.isprintable() and not set(address) & {",", " "}
        if not printable or not 0 < len(address) <= MAX_ADDRESS_CHARS:
            raise InvalidRequest(f"a join token cannot hold the address {address[:MAX_ADDRESS_CHARS]!r}")


def _read_addresses(data: bytes) -> tuple[str, ...]:
    try:
        return tuple(data.decode("ascii").split(","))
    except UnicodeDecodeError:
        raise InvalidRequest("the join token's addresses are not ASCII; make a new one") from None


def _checksum(line: str) -> str:
    return _encode(hashlib.sha256(line.encode("utf-8", "surrogatepass")).digest()[:CHECKSUM_BYTES])


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    """Only the one spelling `_encode` gives: with two, two lines would be one token."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if _encode(data) != text:
        raise InvalidRequest(f"the join token's part {text[:16]!r} is not base64url; copy it again")
    return data
