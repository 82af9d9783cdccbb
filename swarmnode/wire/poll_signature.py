"""Polled requests are signed with the node's key: whoever sees a link's name can neither push into it nor empty it.

What they carry is TLS already; the signature keeps strangers from breaking a link or making the coordinator hold bytes.
It covers the body's digest, which a header names, so that it is checked before any of the body is waited for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from swarmnode.errors import Unauthorized
from swarmnode.wire.certificates import PrivateKey, node_id
from swarmnode.wire.link import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.ids import NodeId

KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = "x-swarm-key", "x-swarm-time", "x-swarm-signature"
DIGEST_HEADER = "x-swarm-digest"
"""Hexadecimal SHA-256 of the body."""
MAX_SKEW_S = 300.0
"""Home PCs' clocks differ. A request that was seen before is refused by its number within its link, not by its time."""
MAX_VALUE_CHARS = 512
"""A P-256 key in DER has 91 bytes, a signature 72 at most; in base64 a third more."""
KNOWN_KEYS = 512
"""Public keys that are kept ready: those of a large swarm, in less than a megabyte."""
_ALGORITHM = ec.ECDSA(hashes.SHA256())


class Signer:
    """Signs requests with one node's key."""

    def __init__(self, key: PrivateKey) -> None:
        self._key = key
        self._public = _text(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))

    def sign(self, method: str, target: str, body: bytes, now: float) -> dict[str, str]:
        """The headers of one request; `target` is its path with its query, `now` in Unix seconds."""
        time, digest = f"{now:.3f}", _digest(body)
        signature = self._key.sign(_text_of(method, target, time, digest), _ALGORITHM)
        return {
            KEY_HEADER: self._public,
            TIME_HEADER: time,
            DIGEST_HEADER: digest,
            SIGNATURE_HEADER: _text(signature),
        }


@dataclass(frozen=True, slots=True)
class Signed:
    """Whose key signed a request; its body is still to be held against the digest."""

    node: NodeId
    digest: str

    def check_body(self, body: bytes) -> None:
        """Raises Unauthorized."""
        if _digest(body) != self.digest:
            raise Unauthorized(f"the body is not the one that was signed: its SHA-256 is not that of {DIGEST_HEADER}")


def check(headers: Mapping[str, str], method: str, target: str, now: float) -> Signed:
    """The node whose key signed this request; its id is that of the key. Raises Unauthorized."""
    if SIGNATURE_HEADER in headers and DIGEST_HEADER not in headers:
        raise Unauthorized(
            f"the request has no {DIGEST_HEADER}, so it is of protocol 1; this node speaks {PROTOCOL[0]} to "
            f"{PROTOCOL[1]}; update the older program"
        )
    try:
        public, signature = headers[KEY_HEADER][:MAX_VALUE_CHARS], _bytes(headers[SIGNATURE_HEADER])
        time, digest = (headers[name][:MAX_VALUE_CHARS] for name in (TIME_HEADER, DIGEST_HEADER))
        skew_s = abs(float(time) - now)
        key, node = _loaded(public)
    except (KeyError, ValueError, UnsupportedAlgorithm):
        names = ", ".join((KEY_HEADER, TIME_HEADER, DIGEST_HEADER, SIGNATURE_HEADER))
        raise Unauthorized(f"a polled request is signed with its node's key: by the headers {names}") from None
    if not skew_s <= MAX_SKEW_S:
        raise Unauthorized(f"the request was signed {skew_s:.0f} s from now; is one of the two clocks wrong?")
    try:
        key.verify(signature, _text_of(method, target, time, digest), _ALGORITHM)
    except InvalidSignature:
        raise Unauthorized("the request's signature is not that of its key") from None
    return Signed(node, digest)


@lru_cache(maxsize=KNOWN_KEYS)
def _loaded(text: str) -> tuple[ec.EllipticCurvePublicKey, NodeId]:
    """A key as its header gives it, with the id of its node: to read it takes as long as to check a signature."""
    key = load_der_public_key(_bytes(text))
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Unauthorized("a polled request is signed with a P-256 key")
    return key, node_id(key)


def _text_of(method: str, target: str, time: str, digest: str) -> bytes:
    """What is signed."""
    return f"swarmnode-poll/1\n{method}\n{target}\n{time}\n{digest}".encode()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text[:MAX_VALUE_CHARS], validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
