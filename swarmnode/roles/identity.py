"""What a node keeps of itself in its data directory: its key (made on the first start), its certificate, its swarm."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cryptography import x509

from swarmnode.cluster.membership import next_incarnation
from swarmnode.errors import Conflict, InvalidRequest, ProtocolError
from swarmnode.private_files import keep_private, read_bounded, unwritable_as_no_space
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import Place, parse_place
from swarmnode.wire.tls import CredentialFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from swarmnode.ids import NodeId

T = TypeVar("T")
FOLDER = "identity"
KEY = "key.pem"
CA_KEY = "ca-key.pem"
MAX_FILE_BYTES = 64 << 10
"""PEM files and a list of addresses: beyond this it is not ours."""
MAX_ADDRESSES = 16
"""Addresses of coordinators a peer remembers."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Which swarm a node belongs to, and where its coordinators answered last."""

    ca: x509.Certificate
    certificate: x509.Certificate
    coordinators: tuple[Place, ...]

    @property
    def about(self) -> certs.NodeCertificate:
        return certs.read_certificate(self.certificate)


class NodeIdentity:
    """The folder `identity/` of a data directory, 0700; every file in it 0600. What writes raises NoSpace.

    A key that is made is written with the first thing that counts on it; until then nothing of it is left behind.
    """

    def __init__(self, folder: Path, key: certs.PrivateKey, *, kept: bool) -> None:
        self.folder = folder
        self.key = key
        self.kept = kept
        """Whether the key is on disk."""
        self.node: NodeId = certs.node_id(key.public_key())

    @classmethod
    def open(cls, data_dir: Path) -> NodeIdentity:
        """Read the key, or make it. Raises InvalidRequest for a damaged one: a new key would be a new node."""
        folder = data_dir / FOLDER
        key = _read(folder / KEY, certs.key_from_pem)
        return cls(folder, key or certs.new_key(), kept=key is not None)

    def keep(self) -> None:
        """From now on this key is the node's, at its next start, too."""
        if not self.kept:
            with unwritable_as_no_space(self.folder):
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_private(self.folder / KEY, certs.key_to_pem(self.key))
            self.kept = True

    def discard(self) -> None:
        """Nobody counts on the key that was kept a moment ago. Where it cannot be removed, the next start uses it."""
        self.kept = False
        with suppress(OSError):
            (self.folder / KEY).unlink()
            self.folder.rmdir()

    @property
    def files(self) -> CredentialFiles:
        return CredentialFiles(self.folder / KEY, self.folder / "certificate.pem", self.folder / "ca.pem")

    def membership(self) -> Membership | None:
        """The swarm this node belongs to; None before it joined one."""
        ca = _read(self.files.ca, x509.load_pem_x509_certificate)
        certificate = _read(self.files.certificate, x509.load_pem_x509_certificate)
        if ca is None or certificate is None:
            return None
        if certs.node_id(certificate.public_key()) != self.node:  # type: ignore[arg-type]
            raise InvalidRequest(f"{self.files.certificate} is not for the key beside it; restore them together")
        return Membership(ca, certificate, _read(self.folder / "coordinators.json", _parse_places) or ())

    def certified(self, now: float) -> bool:
        """Whether there is a certificate that is good now, and a coordinator to show it to."""
        member = self.membership()
        return member is not None and bool(member.coordinators) and now < member.about.ends_s

    def coordinators(self) -> tuple[Place, ...]:
        """Where the swarm's coordinators answered last; none for a coordinator itself."""
        member = self.membership()
        return () if member is None else member.coordinators

    def join(self, ca: x509.Certificate, certificate: x509.Certificate, coordinators: Sequence[Place]) -> None:
        """Become a member. Raises Conflict where the node belongs to another swarm already."""
        self.check_swarm(certs.fingerprint(ca))
        self.remember(coordinators)
        self._write(self.files.ca, certs.to_pem(ca))
        self.renew(certificate)

    def renew(self, certificate: x509.Certificate) -> None:
        """Keep a certificate that was checked (`certificates.check_issued`) and is for this node's key."""
        if certs.read_certificate(certificate).node != self.node:
            raise ProtocolError("the certificate that came is another node's")
        self._write(self.files.certificate, certs.to_pem(certificate))

    def remember(self, coordinators: Sequence[Place]) -> None:
        text = json.dumps([str(place) for place in coordinators[:MAX_ADDRESSES]])
        self._write(self.folder / "coordinators.json", text.encode())

    def term(self) -> int:
        """The latest term that a coordinator was heard of in."""
        return _read(self.folder / "term", int) or 0

    def keep_term(self, term: int) -> None:
        self._write(self.folder / "term", str(term).encode())

    def incarnation(self) -> int:
        """The latest that this node said; 0 before its first start."""
        return _read(self.folder / "incarnation", int) or 0

    def next_incarnation(self, above: int = 0) -> int:
        """One more than any before, and than `above`: on disk before anybody hears of it."""
        value = next_incarnation(self.incarnation(), above)
        self._write(self.folder / "incarnation", str(value).encode())
        return value

    def _write(self, path: Path, data: bytes) -> None:
        self.keep()
        keep_private(path, data)

    def check_swarm(self, ca_hash: bytes) -> None:
        """Raises Conflict where this node belongs to a swarm with another CA."""
        member = self.membership()
        if member is not None and certs.fingerprint(member.ca) != ca_hash:
            raise Conflict(
                f"{self.folder.parent} belongs to another swarm; join this one with another --data-dir, or remove "
                f"{self.folder} to leave the old one for good"
            )


class SwarmAuthority:
    """The CA of the swarm that a coordinator made; its key lies beside the coordinator's own, 0600."""

    def __init__(self, certificate: x509.Certificate, key: certs.PrivateKey) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def take(cls, identity: NodeIdentity, key_pem: bytes) -> SwarmAuthority:
        """Keep the key that a coordinator gave this node. Raises ProtocolError where it is not this swarm's."""
        member = identity.membership()
        try:
            key = certs.key_from_pem(key_pem)
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"the swarm's key cannot be read: {error}") from None
        if member is None or member.ca.public_key() != key.public_key():
            raise ProtocolError("the key that came is not that of this swarm's CA")
        keep_private(identity.folder / CA_KEY, key_pem)
        return cls(member.ca, key)

    @classmethod
    def kept(cls, identity: NodeIdentity) -> SwarmAuthority | None:
        """What `take` kept; None where this node was given no key."""
        key = _read(identity.folder / CA_KEY, certs.key_from_pem)
        member = identity.membership()
        return None if key is None or member is None else cls(member.ca, key)

    @classmethod
    def open(cls, identity: NodeIdentity, now: float) -> SwarmAuthority:
        """The CA in the identity's folder, made on the first start. Raises Conflict where the node is a peer."""
        identity.keep()
        path = identity.folder / CA_KEY
        key = _read(path, certs.key_from_pem)
        certificate = _read(identity.files.ca, x509.load_pem_x509_certificate)
        if key is None and certificate is not None:
            raise Conflict(
                f"{identity.folder.parent} belongs to a peer of another coordinator's swarm; a coordinator needs a "
                "--data-dir of its own"
            )
        if key is None:
            key = certs.new_key()
            keep_private(path, certs.key_to_pem(key))
        if certificate is None:
            certificate = certs.new_ca(key, now)
            keep_private(identity.files.ca, certs.to_pem(certificate))
        if certificate.public_key() != key.public_key():
            raise InvalidRequest(f"{identity.files.ca} is not the certificate of {path}; restore them together")
        return cls(certificate, key)

    def issue(self, request_der: bytes, roles: Sequence[str], now: float) -> x509.Certificate:
        """A node's certificate. Raises ProtocolError for a request that is none."""
        return certs.issue(self.certificate, self._key, certs.read_request(request_der), roles, now)

    def seat(self, request_der: bytes, roles: Sequence[str], now: float) -> tuple[x509.Certificate, bytes]:
        """For a node that may coordinate: its certificate, and this CA's key (PEM). Raises as `issue`."""
        return self.issue(request_der, roles, now), certs.key_to_pem(self._key)


def _read(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """What `parse` makes of a file; None where there is no file."""
    try:
        return parse(read_bounded(path, MAX_FILE_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error!s:.200}); restore it, or remove {path.parent} to become a new node"
        ) from error


def _parse_places(data: bytes) -> tuple[Place, ...]:
    places = json.loads(data)
    if not isinstance(places, list):
        raise ValueError("it is not a list of addresses")
    return tuple(parse_place(str(place)) for place in places[:MAX_ADDRESSES])
