"""The swarm's certificates: what they say, who may sign them, what is refused."""

from __future__ import annotations

import datetime
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from swarmnode.errors import ProtocolError
from swarmnode.wire import certificates as certs

NOW = 1_800_000_000.0
DAY_S = 86_400


def issued(roles: tuple[str, ...] = ("peer",)) -> tuple[x509.Certificate, x509.Certificate, certs.PrivateKey]:
    ca_key, key = certs.new_key(), certs.new_key()
    ca = certs.new_ca(ca_key, NOW)
    return ca, certs.issue(ca, ca_key, certs.read_request(certs.new_request(key)), roles, NOW), key


@pytest.mark.parametrize("roles", [("peer",), ("coordinator",), ("coordinator", "peer")])
def test_a_certificate_says_whose_it_is_and_for_how_long(roles: tuple[str, ...]) -> None:
    ca, certificate, key = issued(roles)
    about = certs.check_issued(certificate, ca, NOW)
    assert about.node == certs.node_id(key.public_key())
    assert about.roles == roles
    assert about.ends_s - NOW == 30 * DAY_S
    assert about.serial == certificate.serial_number
    assert about.starts_s < certs.renewal_s(about) < about.ends_s
    assert (about.ends_s - certs.renewal_s(about)) / DAY_S == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize("now", [NOW - 2 * 3600, NOW + 30 * DAY_S])
def test_a_certificate_outside_its_days_is_refused(now: float) -> None:
    ca, certificate, _ = issued()
    with pytest.raises(ProtocolError, match="clock"):
        certs.check_issued(certificate, ca, now)


def test_another_cas_certificate_is_refused() -> None:
    _, certificate, _ = issued()
    other, _, _ = issued()
    with pytest.raises(ProtocolError, match="this swarm's CA"):
        certs.check_issued(certificate, other, NOW)


def test_a_peer_cannot_sign_another_node() -> None:
    """Its certificate is no CA's, so one made with its key is not directly issued by the swarm's."""
    ca, peer, key = issued()
    forged = certs.issue(peer, key, certs.new_key().public_key(), ("coordinator",), NOW)
    with pytest.raises(ProtocolError):
        certs.check_issued(forged, ca, NOW)


def test_an_id_belongs_to_its_key() -> None:
    """A request cannot ask for the id of another node: the id is computed from the key that signed it."""
    ca, certificate, key = issued()
    lying = x509.CertificateBuilder(
        issuer_name=ca.subject,
        subject_name=certificate.subject,
        public_key=certs.new_key().public_key(),
        serial_number=5,
        not_valid_before=datetime.datetime.fromtimestamp(NOW, datetime.UTC),
        not_valid_after=datetime.datetime.fromtimestamp(NOW + 60, datetime.UTC),
        extensions=[certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)],
    ).sign(key, hashes.SHA256())
    with pytest.raises(ProtocolError, match="not that of its key"):
        certs.read_certificate(lying)


def requests() -> dict[str, bytes]:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    good = certs.new_request(certs.new_key())
    der = serialization.Encoding.DER
    return {
        "empty": b"",
        "noise": b"\x30\x82" + bytes(200),
        "cut": good[:-1],
        "signature changed": good[:-1] + bytes([good[-1] ^ 1]),
        "another curve": builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()).public_bytes(der),
        "RSA": builder.sign(rsa.generate_private_key(65537, 2048), hashes.SHA256()).public_bytes(der),
        "oversized": good + bytes(certs.MAX_CERTIFICATE_BYTES),
    }


@pytest.mark.parametrize("name", requests())
def test_bad_requests_are_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        certs.read_request(requests()[name])


@pytest.mark.parametrize("der", [b"", b"\x30\x03\x02\x01\x05", bytes(5000)])
def test_what_is_no_certificate_is_refused(der: bytes) -> None:
    with pytest.raises(ProtocolError):
        certs.load_certificate(der)


def test_a_ca_certificate_is_none_of_a_node(tmp_path: object) -> None:
    with pytest.raises(ProtocolError, match="names no node"):
        certs.read_certificate(certs.new_ca(certs.new_key(), time.time()))


def test_keys_are_p256(tmp_path: object) -> None:
    key = certs.new_key()
    assert certs.key_from_pem(certs.key_to_pem(key)).private_numbers() == key.private_numbers()
    other = ec.generate_private_key(ec.SECP384R1())
    pem = other.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(ValueError, match="P-256"):
        certs.key_from_pem(pem)
