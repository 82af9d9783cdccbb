"""Polled requests are signed with the node's key: whoever sees a link's name can neither push into it nor empty it.

What they carry is TLS already; the signature keeps strangers from breaking a link or making the coordinator hold bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from swarmnode.errors import Unauthorized
from swarmnode.wire.certificates import PrivateKey, node_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.ids import NodeId

KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = "x-swarm-key", "x-swarm-time", "x-swarm-signature"
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
        time = f"{now:.3f}"
        signature = self._key.sign(_signed(method, target, body, time), _ALGORITHM)
        return {KEY_HEADER: self._public, TIME_HEADER: time, SIGNATURE_HEADER: _text(signature)}


def check(headers: Mapping[str, str], method: str, target: str, body: bytes, now: float) -> NodeId:
    """The node whose key signed this request; its id is that of the key. Raises Unauthorized."""
    try:
        public, signature = headers[KEY_HEADER][:MAX_VALUE_CHARS], _bytes(headers[SIGNATURE_HEADER])
        time = headers[TIME_HEADER][:MAX_VALUE_CHARS]
        skew_s = abs(float(time) - now)
        key, node = _loaded(public)
    except (KeyError, ValueError, UnsupportedAlgorithm):
        raise Unauthorized("a polled request is signed: with x-swarm-key, x-swarm-time and x-swarm-signature") from None
    if not skew_s <= MAX_SKEW_S:
        raise Unauthorized(f"the request was signed {skew_s:.0f} s from now; is one of the two clocks wrong?")
    try:
        key.verify(signature, _signed(method, target, body, time), _ALGORITHM)
    except InvalidSignature:
        raise Unauthorized("the request's signature is not that of its key") from None
    return node


@lru_cache(maxsize=KNOWN_KEYS)
def _loaded(text: str) -> tuple[ec.EllipticCurvePublicKey, NodeId]:
    """A key as its header gives it, with the id of its node: to read it takes as long as to check a signature."""
    key = load_der_public_key(_bytes(text))
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Unauthorized("a polled request is signed with a P-256 key")
    return key, node_id(key)


def _signed(method: str, target: str, body: bytes, time: str) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return f"swarmnode-poll/1\n{method}\n{target}\n{time}\n{digest}".encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text[:MAX_VALUE_CHARS], validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
