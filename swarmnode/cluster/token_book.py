"""API tokens as a value: who may do what until when. Every change gives a new book; time and randomness are arguments.

Only SHA-256 hashes are kept. Tokens hold 256 random bits, so an unsalted hash cannot be searched for them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from swarmnode.errors import Conflict, InvalidRequest, TokenNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TOKEN_PREFIX = "sk-swarm-"
SECRET_BYTES = 32
PRUNE_AFTER_S = 31 * 86_400
"""Until then an expired token still counts: enforcement must not lapse while a client could renew."""
MAX_TOKENS = 1000
MAX_LABEL_CHARS = 100
MAX_LIFE_S = 100 * 365 * 86_400
_ID_CHARS = 12


class Scope(IntEnum):
    """What a token may do; a higher scope includes the lower ones."""

    READ = 1
    OPERATE = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        return self.name.lower()

    def included(self) -> list[str]:
        """The names of all scopes this one grants, lowest first."""
        return [scope.label for scope in Scope if scope <= self]


SCOPE_NAMES = tuple(scope.label for scope in Scope)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One token, without the token. Times are Unix seconds: expiry outlives restarts and suspends."""

    id: str
    label: str
    scope: Scope
    sha256: str
    created_unix: float
    expires_unix: float | None = None

    def expired(self, now: float) -> bool:
        return self.expires_unix is not None and now >= self.expires_unix

    def prunable(self, now: float) -> bool:
        return self.expires_unix is not None and now >= self.expires_unix + PRUNE_AFTER_S

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "label": self.label,
            "scope": self.scope.label,
            "sha256": self.sha256,
            "created_unix": self.created_unix,
            "expires_unix": self.expires_unix,
        }


_DECOY = TokenRecord("", "", Scope.READ, "0" * 64, 0.0, 0.0)
"""What an unknown token is compared with, so that it costs what a known one does; it has always been expired."""


@dataclass(frozen=True)
class TokenBook:
    """All tokens that were not revoked. `now` is in Unix seconds everywhere."""

    records: tuple[TokenRecord, ...] = ()
    _by_hash: Mapping[str, TokenRecord] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_hash", {record.sha256: record for record in self.records})

    def enforced(self, now: float) -> bool:
        """Whether any token exists: expired ones count until they are pruned, revoked ones do not."""
        return any(not record.prunable(now) for record in self.records)

    def authenticate(self, token: str, now: float) -> TokenRecord | None:
        """The token's record, or None; unknown, expired, revoked and malformed tokens all take the same steps."""
        presented = _hash(token)
        record = self._by_hash.get(presented, _DECOY)
        same = hmac.compare_digest(record.sha256, presented)
        return record if same & (not record.expired(now)) else None

    def issue(
        self, label: str, scope: Scope, secret: bytes, now: float, expires_in_s: float | None = None
    ) -> tuple[TokenBook, TokenRecord, str]:
        """The book with one more token, its record, and the token itself, which is nowhere kept.

        `secret` is SECRET_BYTES of randomness. Raises InvalidRequest, or Conflict when the book is full.
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a token's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        book = self.pruned(now)
        if len(book.records) >= MAX_TOKENS:
            raise Conflict(f"there are {MAX_TOKENS} API tokens already; revoke some first")
        token = TOKEN_PREFIX + base64.urlsafe_b64encode(secret).rstrip(b"=").decode("ascii")
        digest = _hash(token)
        expires = None if expires_in_s is None else now + check_life(expires_in_s)
        record = TokenRecord(digest[:_ID_CHARS], check_label(label), scope, digest, now, expires)
        return TokenBook((*book.records, record)), record, token

    def revoke(self, token_id: str, now: float) -> tuple[TokenBook, TokenRecord]:
        """The book without that token, and its record; raises TokenNotFound."""
        record = next((record for record in self.records if record.id == token_id), None)
        if record is None:
            raise TokenNotFound(f"no API token has the id {token_id[:40]!r}; `swarmnode tokens` lists them")
        rest = tuple(other for other in self.records if other is not record)
        return TokenBook(rest).pruned(now), record

    def pruned(self, now: float) -> TokenBook:
        """The book without tokens that expired PRUNE_AFTER_S ago; the same object where there are none."""
        kept = tuple(record for record in self.records if not record.prunable(now))
        return self if len(kept) == len(self.records) else TokenBook(kept)

    def as_json(self) -> list[dict[str, Any]]:
        return [record.as_json() for record in self.records]

    @classmethod
    def read(cls, rows: object) -> TokenBook:
        """A book from what `as_json` gave; raises ValueError for anything else."""
        if not isinstance(rows, list) or len(rows) > MAX_TOKENS:
            raise ValueError("the tokens are not a list")
        records = tuple(_read_record(row) for row in rows)
        for key in ("id", "sha256"):
            if len({getattr(record, key) for record in records}) != len(records):
                raise ValueError(f"two tokens have the same {key}")
        return cls(records)


def parse_scope(names: Iterable[str]) -> Scope:
    """The highest of the named scopes, which includes the others; raises InvalidRequest that names the allowed ones."""
    found = []
    for name in names:
        if name not in SCOPE_NAMES:
            raise InvalidRequest(f"scope {name[:40]!r} is not one of {', '.join(SCOPE_NAMES)}", param="scopes")
        found.append(Scope[name.upper()])
    if not found:
        raise InvalidRequest(f"scopes is empty; name one of {', '.join(SCOPE_NAMES)}", param="scopes")
    return max(found)


def check_label(label: str) -> str:
    """The label without outer blanks; raises InvalidRequest. Control characters would act on a terminal."""
    label = label.strip()
    if not 0 < len(label) <= MAX_LABEL_CHARS or not label.isprintable():
        raise InvalidRequest(f"a label has 1 to {MAX_LABEL_CHARS} printable characters", param="label")
    return label


def check_life(expires_in_s: float) -> float:
    if not 0 < expires_in_s <= MAX_LIFE_S:
        raise InvalidRequest(f"expires_in_s is more than 0 and at most {MAX_LIFE_S} (100 years)", param="expires_in_s")
    return expires_in_s


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _read_record(row: object) -> TokenRecord:
    if not isinstance(row, dict):
        raise ValueError("a token is not an object")
    try:
        digest, expires = str(row["sha256"]), row["expires_unix"]
        times = [float(time) for time in (row["created_unix"], expires) if time is not None]
        if not all(math.isfinite(time) for time in times):
            raise ValueError("a token's time is not a number")  # NaN would never expire
        if len(bytes.fromhex(digest)) != hashlib.sha256().digest_size or digest != digest.lower():
            raise ValueError("a token's sha256 is not 64 lower-case hex digits")
        return TokenRecord(
            id=str(row["id"]),
            label=str(row["label"]),
            scope=Scope[str(row["scope"]).upper()],
            sha256=digest,
            created_unix=float(row["created_unix"]),
            expires_unix=None if expires is None else float(expires),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a token lacks a field or has a wrong one: {error}") from error
