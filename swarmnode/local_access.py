"""How this machine's own command line gets into its API: a secret and the API's address in a 0600 file.

The secret is new at every start of the node, and goes only to the address that stands beside it: whoever takes the
port over while no node runs learns nothing that opens the next one.
"""

from __future__ import annotations

import json
import secrets
import ssl
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from swarmnode.private_files import keep_private

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "local_api.json"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_SECRET_BYTES = 32
_MAX_FILE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class LocalAccess:
    """`url` is where the API is bound; `certificate` the file that its TLS shows, if it has one."""

    url: str
    secret: str
    certificate: str | None = None

    def serves(self, url: str) -> bool:
        """Whether `url` is this API, by its bound address or a loopback name."""
        ours, theirs = urlsplit(self.url), urlsplit(url)
        names = LOOPBACK_NAMES | {ours.hostname}
        return (ours.scheme, ours.port) == (theirs.scheme, theirs.port) and theirs.hostname in names


def make_local_access(url: str, certificate: Path | None) -> LocalAccess:
    path = str(certificate.absolute()) if certificate is not None else None
    return LocalAccess(url, secrets.token_urlsafe(_SECRET_BYTES), path)


def write_local_access(data_dir: Path, access: LocalAccess) -> None:
    """Raises NoSpace."""
    keep_private(data_dir / FILE_NAME, json.dumps(asdict(access)).encode())


def forget_local_access(data_dir: Path) -> None:
    (data_dir / FILE_NAME).unlink(missing_ok=True)


def trust_exactly(certificate: str) -> ssl.SSLContext:
    """A client's TLS that accepts this certificate (PEM) and no other, whatever names it holds.

    Raises ssl.SSLError, ValueError.
    """
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False  # a node is reached under many names; its certificate came from itself
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def read_local_access(data_dir: Path, url: str) -> LocalAccess | None:
    """The way into the API at `url`, if a node of this data directory serves it."""
    try:
        with (data_dir / FILE_NAME).open("rb") as file:
            access = LocalAccess(**json.loads(file.read(_MAX_FILE_BYTES)))
        return access if access.serves(url) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # another user's node, or none: then a token is needed, and the API says so
