"""The swarm's certificates: a CA per swarm, one certificate per node that holds its id and roles, requests for them."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from swarmnode.errors import ProtocolError
from swarmnode.ids import NodeId

if TYPE_CHECKING:
    from collections.abc import Sequence

PrivateKey = ec.EllipticCurvePrivateKey
CA_DAYS = 3650
"""A swarm's CA outlives the machines that use it; replacing it means joining again."""
NODE_DAYS = 30
"""Short, because a certificate renews itself; a node that was off longer joins again with a token."""
BACKDATED_S = 3600.0
"""Home PCs' clocks differ; a new certificate must not lie in the future of the machine that checks it."""
MAX_CERTIFICATE_BYTES = 4096
"""Of one certificate or request in DER; ours have some 500."""
NODE_ID_CHARS = 32
_URI = "swarmnode://node/"


@dataclass(frozen=True, slots=True)
class NodeCertificate:
    """What a node's certificate says; times are Unix seconds."""

    node: NodeId
    roles: tuple[str, ...]
    serial: int
    starts_s: float
    ends_s: float


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def node_id(public_key: ec.EllipticCurvePublicKey) -> NodeId:
    """128 bits of the key's SHA-256: nobody can ask for a certificate with the id of another node."""
    spki = public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return NodeId(hashlib.sha256(spki).hexdigest()[:NODE_ID_CHARS])


def new_ca(key: PrivateKey, now: float) -> x509.Certificate:
    """A self-signed CA that may sign nodes only, not further CAs."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"swarm {node_id(key.public_key())[:8]}")])
    builder = _builder(key.public_key(), name, name, x509.random_serial_number(), _lifetime(now, CA_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return builder.sign(key, hashes.SHA256())


def new_request(key: PrivateKey) -> bytes:
    """A certificate request in DER; it proves that whoever sends it holds the key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_id(key.public_key()))])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def read_request(der: bytes) -> ec.EllipticCurvePublicKey:
    """The key a request is for; its id is `node_id` of it. Raises ProtocolError."""
    _check_size(der, "request")
    try:
        request = x509.load_der_x509_csr(der)
        key = request.public_key()
        valid = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ProtocolError(f"the certificate request cannot be read: {error!s:.200}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1) or not valid:
        raise ProtocolError("the certificate request is not signed with a P-256 key of its own")
    return key


def issue(
    ca: x509.Certificate, ca_key: PrivateKey, public_key: ec.EllipticCurvePublicKey, roles: Sequence[str], now: float
) -> x509.Certificate:
    """A node's certificate: its id (that of the key) in the SAN, its roles in the subject."""
    node = node_id(public_key)
    roles_of = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in roles]
    subject = x509.Name([*roles_of, x509.NameAttribute(NameOID.COMMON_NAME, node)])
    builder = _builder(public_key, subject, ca.subject, x509.random_serial_number(), _lifetime(now, NODE_DAYS))
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(both, critical=False)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_URI + node)])
    return builder.add_extension(names, critical=False).sign(ca_key, hashes.SHA256())


def load_certificate(der: bytes) -> x509.Certificate:
    """Raises ProtocolError for anything but one certificate of a sane size."""
    _check_size(der, "certificate")
    try:
        return x509.load_der_x509_certificate(der)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ProtocolError(f"the certificate cannot be read: {error!s:.200}") from None


def read_certificate(certificate: x509.Certificate) -> NodeCertificate:
    """What a certificate says of its node; raises ProtocolError where it is none of a node, or not for its own key."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        roles = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        key = certificate.public_key()
    except (x509.ExtensionNotFound, ValueError, UnsupportedAlgorithm) as error:
        raise ProtocolError(f"the certificate names no node: {error!s:.200}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or uri != _URI + node_id(key):
        raise ProtocolError(f"the certificate's name {uri[:80]!r} is not that of its key")
    return NodeCertificate(
        node=node_id(key),
        roles=tuple(str(role.value) for role in roles),
        serial=certificate.serial_number,
        starts_s=certificate.not_valid_before_utc.timestamp(),
        ends_s=certificate.not_valid_after_utc.timestamp(),
    )


def check_issued(certificate: x509.Certificate, ca: x509.Certificate, now: float) -> NodeCertificate:
    """Hold a node's certificate against the CA and the clock; raises ProtocolError."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise ProtocolError("the certificate was not issued by this swarm's CA") from None
    about = read_certificate(certificate)
    if not about.starts_s <= now < about.ends_s:
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        raise ProtocolError(f"the certificate is valid from {start:%F %R} to {end:%F %R} UTC; is this clock right?")
    return about


def fingerprint(certificate: x509.Certificate) -> bytes:
    """SHA-256 of the DER form: what a join token pins."""
    return certificate.fingerprint(hashes.SHA256())


def to_der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_to_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_from_pem(data: bytes) -> PrivateKey:
    """Raises ValueError for anything but a P-256 key."""
    key = serialization.load_pem_private_key(data, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("it is not a P-256 key")
    return key


def renewal_s(certificate: NodeCertificate) -> float:
    """When to ask for the next one: two thirds through, so that ten days of trouble cost nothing."""
    return certificate.starts_s + (certificate.ends_s - certificate.starts_s) * 2 / 3


def _lifetime(now: float, days: int) -> tuple[datetime.datetime, datetime.datetime]:
    start = datetime.datetime.fromtimestamp(int(now), datetime.UTC)
    return start - datetime.timedelta(seconds=BACKDATED_S), start + datetime.timedelta(days=days)


def _builder(
    key: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    issuer: x509.Name,
    serial: int,
    lifetime: tuple[datetime.datetime, datetime.datetime],
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().public_key(key).subject_name(subject).issuer_name(issuer)
    return builder.serial_number(serial).not_valid_before(lifetime[0]).not_valid_after(lifetime[1])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _check_size(der: bytes, what: str) -> None:
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"a certificate {what} of {len(der)} bytes; allowed are {MAX_CERTIFICATE_BYTES}")
