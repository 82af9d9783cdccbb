"""Certificates for tests: a swarm's CA, nodes that it certified, and the same things gone wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnode.ids import BootId, NodeId
from swarmnode.wire import certificates as certs
from swarmnode.wire.link import Identity
from swarmnode.wire.tls import CredentialFiles, SwarmTls

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cryptography import x509


@dataclass(frozen=True)
class Node:
    """A node with files of its own."""

    node: NodeId
    key: certs.PrivateKey
    certificate: x509.Certificate
    files: CredentialFiles
    identity: Identity

    def tls(self, *, enrolment: bool = False) -> SwarmTls:
        return SwarmTls(self.files, enrolment=enrolment)


@dataclass
class Swarm:
    """A CA and what it certifies, under `folder`."""

    folder: Path
    key: certs.PrivateKey = field(default_factory=certs.new_key)

    def __post_init__(self) -> None:
        self.ca = certs.new_ca(self.key, time.time())

    def node(self, name: str, roles: Sequence[str] = ("peer",), *, now: float | None = None) -> Node:
        """`now`: when it was certified."""
        key = certs.new_key()
        issued_s = time.time() if now is None else now
        certificate = certs.issue(self.ca, self.key, key.public_key(), roles, issued_s)
        return self.write(name, key, certificate, roles)

    def write(self, name: str, key: certs.PrivateKey, certificate: x509.Certificate, roles: Sequence[str]) -> Node:
        folder = self.folder / name
        folder.mkdir(parents=True)
        files = CredentialFiles(folder / "key.pem", folder / "certificate.pem", folder / "ca.pem")
        files.key.write_bytes(certs.key_to_pem(key))
        files.certificate.write_bytes(certs.to_pem(certificate))
        files.ca.write_bytes(certs.to_pem(self.ca))
        node = certs.node_id(key.public_key())
        return Node(node, key, certificate, files, Identity(node, BootId(f"{name}-boot"), name, tuple(roles)))
