"""Which join secrets are good: made once, stored as hashes, used up, expired, and guessed at a bounded rate.

Pure: time and randomness come from the caller.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swarmnode.errors import InvalidRequest, JoinRefused, Overloaded, TokenNotFound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIN_TTL_S, MAX_TTL_S = 1.0, 30 * 86_400.0
MAX_USES = 1000
MAX_RECORDS = 256
"""Open tokens at a time; the document they are stored in stays small."""
BURST_ATTEMPTS = 10
ATTEMPT_INTERVAL_S = 6.0
"""Failed attempts of one source: ten at once, then one every six seconds."""
MAX_SOURCES = 1024
"""Sources remembered; the one that tried longest ago is forgotten first."""
REFUSED = "the join token is unknown, used up or expired; make a new one with `swarmnode join-token`"
"""The same words for every reason: whoever guesses learns nothing."""


@dataclass(frozen=True, slots=True)
class JoinRecord:
    """`secret_sha256` in hex; times are Unix seconds. `nodes` are those that it let in."""

    id: str
    secret_sha256: str
    expires_s: float
    uses_left: int
    nodes: tuple[str, ...] = ()

    def open(self, now: float) -> bool:
        return self.uses_left > 0 and now < self.expires_s


_NOBODY = JoinRecord("", "0" * 64, 0.0, 0)
"""Compared against when the id is unknown, so that every failure costs the same work."""


class JoinBook:
    """The open join tokens."""

    def __init__(self, records: Sequence[JoinRecord] = ()) -> None:
        self._records = {record.id: record for record in records}

    def add(self, token_id: bytes, secret: bytes, *, ttl_s: float, uses: int, now: float) -> JoinRecord:
        """Raises InvalidRequest for a lifetime or a use count outside the limits, Overloaded for too many."""
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise InvalidRequest(f"ttl {ttl_s:g} s is not within {MIN_TTL_S:g} s to 30 days", param="ttl_s")
        if not 1 <= uses <= MAX_USES:
            raise InvalidRequest(f"uses {uses} is not within 1 to {MAX_USES}", param="uses")
        self.prune(now)
        if len(self._records) >= MAX_RECORDS:
            raise Overloaded(f"{MAX_RECORDS} join tokens are open; wait until some expire")
        record = JoinRecord(token_id.hex(), _sha256(secret), now + ttl_s, uses)
        self._records[record.id] = record
        return record

    def redeem(self, token_id: bytes, secret: bytes, node: str, now: float) -> None:
        """Take one use; raises JoinRefused, with the same words and the same work, for every failure.

        A node that was let in by it may ask again while it lasts, at no use: the answer may have been lost.
        """
        record = self._records.get(token_id.hex(), _NOBODY)
        same = hmac.compare_digest(record.secret_sha256, _sha256(secret))
        again = node in record.nodes and now < record.expires_s
        if not (same & (again or record.open(now))):
            raise JoinRefused(REFUSED)
        if not again:
            nodes = (*record.nodes, node)
            self._records[record.id] = replace(record, uses_left=record.uses_left - 1, nodes=nodes)

    def withdraw(self, token_id: str) -> JoinRecord:
        """Make a token useless; raises TokenNotFound for an id that is none."""
        record = self._records.pop(token_id, None)
        if record is None:
            raise TokenNotFound(f"no join token has the id {token_id[:40]!r}; `swarmnode join-tokens` lists them")
        return record

    def prune(self, now: float) -> None:
        """Forget what has expired; and what is used up, where there is no room."""
        left = [record for record in self._records.values() if now < record.expires_s]
        if len(left) >= MAX_RECORDS:
            left = [record for record in left if record.open(now)]
        self._records = {record.id: record for record in left}

    def records(self) -> tuple[JoinRecord, ...]:
        return tuple(self._records.values())

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "id": r.id,
                "secret_sha256": r.secret_sha256,
                "expires_s": r.expires_s,
                "uses_left": r.uses_left,
                "nodes": list(r.nodes),
            }
            for r in self._records.values()
        ]

    @classmethod
    def from_json(cls, records: Sequence[Mapping[str, Any]]) -> JoinBook:
        """Raises KeyError, TypeError or ValueError for what `as_json` did not write."""
        return cls(
            [
                JoinRecord(
                    str(r["id"]),
                    _hex(r["secret_sha256"]),
                    float(r["expires_s"]),
                    int(r["uses_left"]),
                    tuple(map(str, r.get("nodes", ()))),
                )
                for r in records
            ]
        )


class AttemptBudget:
    """Failed attempts a source (an address) may still make; a success costs nothing."""

    def __init__(self) -> None:
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By source: failures not yet forgiven, and when that was counted."""

    def check(self, source: str, now: float) -> None:
        """Raises Overloaded that says when to try again."""
        failures = self._failures(source, now)
        if failures > BURST_ATTEMPTS - 1:
            wait_s = (failures - (BURST_ATTEMPTS - 1)) * ATTEMPT_INTERVAL_S
            raise Overloaded(f"too many failed attempts to join from {source}; try again in {wait_s:.0f} s")

    def failed(self, source: str, now: float) -> None:
        self._spent[source] = (self._failures(source, now) + 1, now)
        self._spent.move_to_end(source)
        while len(self._spent) > MAX_SOURCES:
            self._spent.popitem(last=False)

    def _failures(self, source: str, now: float) -> float:
        failures, counted_s = self._spent.get(source, (0.0, now))
        return max(0.0, failures - (now - counted_s) / ATTEMPT_INTERVAL_S)


def _sha256(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def _hex(value: object) -> str:
    if not isinstance(value, str) or len(bytes.fromhex(value)) != 32:
        raise ValueError("a stored secret is not 64 hex digits")
    return value
