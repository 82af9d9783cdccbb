"""The source's sentences about API tokens, one test each, and the rules of the book that keeps them."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cluster.token_book import (
    MAX_TOKENS,
    PRUNE_AFTER_S,
    SECRET_BYTES,
    Scope,
    TokenBook,
    TokenRecord,
    parse_scope,
)
from swarmnode.errors import Conflict, InvalidRequest, TokenNotFound

NOW = 1_800_000_000.0
DAY_S = 86_400.0


def secret(number: int = 0) -> bytes:
    return number.to_bytes(SECRET_BYTES, "big")


def issue(book: TokenBook, number: int = 0, expires_in_s: float | None = None) -> tuple[TokenBook, TokenRecord, str]:
    return book.issue(f"token {number}", Scope.OPERATE, secret(number), NOW, expires_in_s)


def test_a_token_has_the_prefix_and_all_256_bits() -> None:
    _, _, token = TokenBook().issue("mine", Scope.READ, bytes(range(32)), NOW)
    assert token == "sk-swarm-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    with pytest.raises(ValueError, match="32 bytes"):
        TokenBook().issue("mine", Scope.READ, bytes(31), NOW)


def test_only_the_hash_is_kept() -> None:
    book, record, token = issue(TokenBook())
    assert record.sha256 == hashlib.sha256(token.encode()).hexdigest()
    assert token not in json.dumps(book.as_json())
    assert token.removeprefix("sk-swarm-") not in json.dumps(book.as_json())
    assert token not in repr(book)


def test_no_token_is_open_mode() -> None:
    assert not TokenBook().enforced(NOW)


def test_any_token_enforces() -> None:
    book, _, _ = issue(TokenBook())
    assert book.enforced(NOW)


def test_an_expired_but_unrevoked_token_still_enforces() -> None:
    book, _, token = issue(TokenBook(), expires_in_s=3600)
    assert book.authenticate(token, NOW + 3600) is None
    assert book.enforced(NOW + 3600)
    assert book.enforced(NOW + 3600 + 30 * DAY_S)


def test_an_expired_token_is_pruned_31_days_after_it_expired_which_opens() -> None:
    book, _, _ = issue(TokenBook(), expires_in_s=3600)
    assert PRUNE_AFTER_S == 31 * DAY_S
    due = NOW + 3600 + 31 * DAY_S
    assert book.enforced(due - 1)
    assert book.pruned(due - 1) is book
    assert not book.enforced(due)
    assert book.pruned(due) == TokenBook()


def test_pruning_takes_the_old_ones_only_and_happens_with_every_change() -> None:
    book, _, _ = issue(TokenBook(), 1, expires_in_s=1)
    book, kept, _ = issue(book, 2)
    book, fresh, _ = book.issue("later", Scope.READ, secret(3), NOW + 32 * DAY_S)
    assert book.records == (kept, fresh)


def test_revoking_every_token_opens() -> None:
    book, first, _ = issue(TokenBook(), 1)
    book, second, _ = issue(book, 2)
    book, gone = book.revoke(first.id, NOW)
    assert gone == first
    assert book.enforced(NOW)
    book, _ = book.revoke(second.id, NOW)
    assert not book.enforced(NOW)


def test_revoking_an_expired_token_opens() -> None:
    book, record, _ = issue(TokenBook(), expires_in_s=1)
    book, _ = book.revoke(record.id, NOW + 10)
    assert not book.enforced(NOW + 10)


def test_a_token_opens_until_its_last_moment() -> None:
    book, record, token = issue(TokenBook(), expires_in_s=60)
    assert book.authenticate(token, NOW + 59.9) == record
    assert book.authenticate(token, NOW + 60) is None


def test_a_revoked_token_is_unknown_and_cannot_be_revoked_twice() -> None:
    book, record, token = issue(TokenBook())
    book, _ = book.revoke(record.id, NOW)
    assert book.authenticate(token, NOW) is None
    with pytest.raises(TokenNotFound):
        book.revoke(record.id, NOW)


def test_every_failure_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hash, one constant-time comparison, one look at the clock, whatever is wrong."""
    book, _, expired = issue(TokenBook(), 1, expires_in_s=1)
    book, record, revoked = issue(book, 2)
    book, _ = book.revoke(record.id, NOW)
    book, _, good = issue(book, 3)
    steps: list[str] = []
    real_compare, real_expired = hmac.compare_digest, TokenRecord.expired

    def compare(a: Any, b: Any) -> bool:
        steps.append(f"compare {len(a)} {len(b)}")
        return real_compare(a, b)

    def check(self: TokenRecord, now: float) -> bool:
        steps.append("expired")
        return real_expired(self, now)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    monkeypatch.setattr(TokenRecord, "expired", check)
    for token in (expired, revoked, "sk-swarm-" + "A" * 43, "", "none", "ü\udcff", "sk-swarm-"):
        steps.clear()
        assert book.authenticate(token, NOW + 2) is None
        assert steps == ["compare 64 64", "expired"]
    assert book.authenticate(good, NOW + 2) is not None


@given(st.integers(0, 2**256 - 1), st.integers(0, 60), st.sampled_from("abAZ09-_ \0é"))
def test_no_other_text_opens(number: int, place: int, letter: str) -> None:
    """One character changed anywhere, cut or added."""
    book, record, token = issue(TokenBook(), number)
    assert book.authenticate(token, NOW) == record
    changed = token[:place] + letter + token[place + 1 :]
    if changed != token:
        assert book.authenticate(changed, NOW) is None
    assert book.authenticate(token[:-1], NOW) is None
    assert book.authenticate(token + letter, NOW) is None
    assert book.authenticate(record.sha256, NOW) is None


@pytest.mark.parametrize(
    ("names", "highest", "included"),
    [
        (["read"], Scope.READ, ["read"]),
        (["operate"], Scope.OPERATE, ["read", "operate"]),
        (["admin", "read"], Scope.ADMIN, ["read", "operate", "admin"]),
        (["read", "operate", "read"], Scope.OPERATE, ["read", "operate"]),
    ],
)
def test_a_higher_scope_includes_the_lower(names: list[str], highest: Scope, included: list[str]) -> None:
    assert parse_scope(names) is highest
    assert highest.included() == included


@pytest.mark.parametrize("names", [[], ["root"], ["read", "Admin"], [""]])
def test_unknown_scopes_name_the_allowed(names: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="read, operate, admin"):
        parse_scope(names)


@pytest.mark.parametrize("label", ["", "  ", "x" * 101, "a\nb", "\x1b[31m", "a\u2028b"])
def test_labels_are_short_and_printable(label: str) -> None:
    with pytest.raises(InvalidRequest, match="label"):
        TokenBook().issue(label, Scope.READ, secret(), NOW)


@pytest.mark.parametrize("life", [0, -1, float("nan"), float("inf"), 101 * 365 * DAY_S])
def test_lives_are_bounded(life: float) -> None:
    with pytest.raises(InvalidRequest, match="expires_in_s"):
        TokenBook().issue("x", Scope.READ, secret(), NOW, life)


def test_the_number_of_tokens_is_bounded() -> None:
    book = TokenBook(tuple(issue(TokenBook(), n)[1] for n in range(MAX_TOKENS)))
    with pytest.raises(Conflict, match="revoke"):
        issue(book, MAX_TOKENS)


def test_a_book_survives_json() -> None:
    book, _, _ = issue(TokenBook(), 1, expires_in_s=5)
    book, record, token = issue(book, 2)
    again = TokenBook.read(json.loads(json.dumps(book.as_json())))
    assert again == book
    assert again.authenticate(token, NOW) == record


def _rows(**changes: Any) -> list[Any]:
    _, record, _ = issue(TokenBook())
    return [{**record.as_json(), **changes}]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {},
        [1],
        [{}],
        _rows(scope="root"),
        _rows(sha256="ab"),
        _rows(sha256="zz" * 32),
        _rows(sha256="AB" * 32),
        _rows(created_unix="soon"),
        _rows(expires_unix=[]),
        _rows(expires_unix=float("nan")),
        _rows() * 2,
        _rows() * (MAX_TOKENS + 1),
    ],
)
def test_a_damaged_book_is_refused(rows: object) -> None:
    with pytest.raises(ValueError):
        TokenBook.read(rows)
