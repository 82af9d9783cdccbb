"""Join secrets: used up, expired, guessed; and a document that survives being written and read."""

from __future__ import annotations

import hmac
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cluster import join_book
from swarmnode.cluster.join_book import (
    ATTEMPT_INTERVAL_S,
    BURST_ATTEMPTS,
    MAX_RECORDS,
    MAX_SOURCES,
    REFUSED,
    AttemptBudget,
    JoinBook,
)
from swarmnode.errors import InvalidRequest, JoinRefused, Overloaded, TokenNotFound

ID, SECRET = b"12345678", b"s" * 32


def book(uses: int = 1, ttl_s: float = 3600) -> JoinBook:
    made = JoinBook()
    made.add(ID, SECRET, ttl_s=ttl_s, uses=uses, now=1000)
    return made


def refusal(made: JoinBook, token_id: bytes, secret: bytes, now: float) -> str:
    with pytest.raises(JoinRefused) as raised:
        made.redeem(token_id, secret, "another", now)
    return raised.value.message


@pytest.mark.parametrize("uses", [1, 2, 5])
def test_a_token_is_good_as_often_as_it_says(uses: int) -> None:
    made = book(uses)
    for number in range(uses):
        made.redeem(ID, SECRET, f"node {number}", 1001)
    assert refusal(made, ID, SECRET, 1001) == REFUSED


def test_a_token_expires() -> None:
    made = book(ttl_s=60, uses=9)
    made.redeem(ID, SECRET, "node", 1059.9)
    assert refusal(made, ID, SECRET, 1060) == REFUSED


def test_a_node_that_lost_its_answer_asks_again_and_nobody_else_does() -> None:
    made = JoinBook.from_json(json.loads(json.dumps(book().as_json())))
    for _ in range(3):
        made.redeem(ID, SECRET, "node", 1001)
        made = JoinBook.from_json(json.loads(json.dumps(made.as_json())))
    assert refusal(made, ID, SECRET, 1001) == REFUSED
    with pytest.raises(JoinRefused):
        made.redeem(ID, b"t" * 32, "node", 1001)
    with pytest.raises(JoinRefused):
        made.redeem(ID, SECRET, "node", 1000 + 3600)


def test_a_withdrawn_token_is_good_for_nobody() -> None:
    made = book(uses=2)
    made.redeem(ID, SECRET, "node", 1001)
    assert made.withdraw(ID.hex()).uses_left == 1
    for node in ("node", "new"):
        with pytest.raises(JoinRefused):
            made.redeem(ID, SECRET, node, 1001)
    with pytest.raises(TokenNotFound, match="no join token"):
        made.withdraw(ID.hex())


def test_used_up_tokens_make_room_before_open_ones_are_refused() -> None:
    made = JoinBook()
    for number in range(MAX_RECORDS):
        made.add(number.to_bytes(8, "big"), SECRET, ttl_s=60, uses=1, now=0)
    made.redeem((7).to_bytes(8, "big"), SECRET, "node", 1)
    made.add(ID, SECRET, ttl_s=60, uses=1, now=2)
    assert len(made.records()) == MAX_RECORDS


def test_a_wrong_secret_uses_nothing_up() -> None:
    made = book()
    assert refusal(made, ID, b"t" * 32, 1001) == REFUSED
    assert refusal(made, b"87654321", SECRET, 1001) == REFUSED
    made.redeem(ID, SECRET, "node", 1001)


def test_every_failure_costs_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    work: Counter[str] = Counter()
    compare, sha256 = hmac.compare_digest, join_book._sha256

    def counted_compare(a: str, b: str) -> bool:
        work[f"compare {len(a)} {len(b)}"] += 1
        return compare(a, b)

    def counted_hash(secret: bytes) -> str:
        work["hash"] += 1
        return sha256(secret)

    used = book()
    used.redeem(ID, SECRET, "node", 1001)
    cases = [(book(), b"87654321", SECRET), (book(), ID, b"t" * 32), (book(ttl_s=1), ID, SECRET), (used, ID, SECRET)]
    monkeypatch.setattr(hmac, "compare_digest", counted_compare)
    monkeypatch.setattr(join_book, "_sha256", counted_hash)
    seen = []
    for made, token_id, secret in cases:
        work.clear()
        refusal(made, token_id, secret, 1500)
        seen.append(dict(work))
    assert seen == [{"hash": 1, "compare 64 64": 1}] * 4


@pytest.mark.parametrize(
    "options", [{"ttl_s": 0}, {"ttl_s": 31 * 86_400}, {"uses": 0}, {"uses": 1001}, {"ttl_s": float("nan")}]
)
def test_limits_are_named(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options)).removesuffix("_s")):
        JoinBook().add(ID, SECRET, **{"ttl_s": 60, "uses": 1, "now": 0, **options})  # type: ignore[arg-type]


def test_open_tokens_are_bounded_and_dead_ones_make_room() -> None:
    made = JoinBook()
    for number in range(MAX_RECORDS):
        made.add(number.to_bytes(8, "big"), SECRET, ttl_s=60, uses=1, now=0)
    with pytest.raises(Overloaded):
        made.add(ID, SECRET, ttl_s=60, uses=1, now=59)
    made.add(ID, SECRET, ttl_s=60, uses=1, now=60)
    assert len(made.records()) == 1


def test_the_document_holds_no_secret_and_reads_back() -> None:
    made = book(uses=3)
    made.redeem(ID, SECRET, "node", 1001)
    text = json.dumps(made.as_json())
    assert SECRET.decode() not in text
    assert SECRET.hex() not in text
    again = JoinBook.from_json(json.loads(text))
    assert again.records() == made.records()
    for number in range(2):
        again.redeem(ID, SECRET, f"new {number}", 1001)
    assert refusal(again, ID, SECRET, 1001) == REFUSED


@pytest.mark.parametrize(
    "damage", [{"secret_sha256": "ab"}, {"secret_sha256": None}, {"uses_left": "x"}, {"id": None, "expires_s": "soon"}]
)
def test_a_damaged_document_is_not_taken(damage: dict[str, object]) -> None:
    (record,) = book().as_json()
    with pytest.raises((ValueError, TypeError)):
        JoinBook.from_json([record | damage])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), max_size=60))
def test_the_budget_against_a_slow_second_implementation(attempts: list[tuple[str, float]]) -> None:
    budget, now = AttemptBudget(), 0.0
    failures: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for source, wait_s in attempts:
        now += wait_s
        bucket, last = 0.0, 0.0
        for at in failures[source]:
            bucket, last = max(0.0, bucket - (at - last) / ATTEMPT_INTERVAL_S) + 1, at
        expected = max(0.0, bucket - (now - last) / ATTEMPT_INTERVAL_S) <= BURST_ATTEMPTS - 1
        try:
            budget.check(source, now)
        except Overloaded:
            assert not expected
        else:
            assert expected
            budget.failed(source, now)
            failures[source].append(now)


def test_one_sources_failures_do_not_keep_another_out_and_memory_is_bounded() -> None:
    budget = AttemptBudget()
    for _ in range(BURST_ATTEMPTS):
        budget.check("attacker", 0)
        budget.failed("attacker", 0)
    with pytest.raises(Overloaded, match="6 s"):
        budget.check("attacker", 0)
    budget.check("friend", 0)
    budget.check("attacker", ATTEMPT_INTERVAL_S)
    for number in range(2 * MAX_SOURCES):
        budget.failed(str(number), 0)
    assert len(budget._spent) == MAX_SOURCES
