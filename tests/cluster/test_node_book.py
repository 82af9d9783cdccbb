"""Members by certificate: names are unique, removal is for good, the document reads back."""

from __future__ import annotations

import json
import math

import pytest

from swarmnode.cluster.node_book import NodeBook, NodeRecord
from swarmnode.errors import Conflict, InvalidRequest, JoinRefused, PeerNotFound
from swarmnode.ids import NodeId

ATTIC, DEN = NodeId("a" * 32), NodeId("d" * 32)
HOUSE = NodeRecord(NodeId("beef" * 8), "house", math.inf)


def two() -> NodeBook:
    book = NodeBook()
    book.issued(ATTIC, "attic", 100.0)
    book.issued(DEN, "den", 200.0)
    return book


def test_a_renewal_lasts_longer() -> None:
    book = two()
    book.issued(DEN, "den", 300.0)
    (record,) = (r for r in book.records() if r.node == DEN)
    assert record.expires_s == 300.0


@pytest.mark.parametrize("by", ["attic", ATTIC, ATTIC[:8], ATTIC[:4]])
def test_a_removed_node_is_revoked_and_gets_no_certificate_again(by: str) -> None:
    book = two()
    assert book.remove(by, 50.0).node == ATTIC
    assert book.revoked() == {ATTIC}
    with pytest.raises(JoinRefused, match="removed"):
        book.issued(ATTIC, "attic", 400.0)
    with pytest.raises(PeerNotFound, match="there are: den"):
        book.remove(by, 51.0)


def test_a_name_is_free_again_once_its_node_is_removed() -> None:
    book = two()
    new = NodeId("e" * 32)
    with pytest.raises(Conflict, match="'attic'"):
        book.issued(new, "attic", 1.0)
    book.remove("attic", 1.0)
    book.issued(new, "attic", 1.0)
    assert book.remove("attic", 2.0).node == new, "the name means the node that is still in"
    assert book.revoked() == {ATTIC, new}


def test_a_new_name_is_noted_once() -> None:
    book = two()
    assert book.renamed(DEN, "cellar")
    assert not book.renamed(DEN, "cellar")
    assert not book.renamed(NodeId("f" * 32), "x")
    assert book.remove("cellar", 1.0).node == DEN


def test_the_document_reads_back() -> None:
    book = two()
    book.remove("den", 9.5)
    again = NodeBook.from_json(json.loads(json.dumps(book.as_json())))
    assert again.records() == book.records()
    assert again.revoked() == {DEN}


@pytest.mark.parametrize("name", ["", "a/../b", "den ", "evil\x1b[2J\nfake line", "\u202eabc", "x" * 65, "."])
@pytest.mark.parametrize("when", ["issued", "renamed"])
def test_what_is_no_name_is_never_taken(when: str, name: str) -> None:
    book = two()
    with pytest.raises(InvalidRequest, match="not allowed"):
        book.issued(DEN, name, 1.0) if when == "issued" else book.renamed(DEN, name)
    assert {record.name for record in book.records()} == {"attic", "den"}


@pytest.mark.parametrize("name", ["attic", "house", ATTIC, ATTIC[:8], HOUSE.node[:8], HOUSE.node[:4]])
def test_nobody_takes_anothers_name_or_what_reads_like_its_id(name: str) -> None:
    book = two()
    for node in (DEN, NodeId("f" * 32)):
        with pytest.raises(Conflict, match="give --name"):
            book.renamed(node, name, HOUSE)
        with pytest.raises(Conflict, match="give --name"):
            book.issued(node, name, 1.0, HOUSE)
    book.check(HOUSE.node, "house", HOUSE)
    book.check(ATTIC, ATTIC[:8], HOUSE)


def test_what_could_be_two_nodes_removes_neither() -> None:
    book = two()
    book.issued(NodeId("d0" * 16), "dada", 1.0)
    book.issued(NodeId("dada" * 8), "new", 1.0)
    for name in ("dada", "d" * 3):
        with pytest.raises((Conflict, PeerNotFound)):
            book.remove(name, 1.0)
    assert book.revoked() == frozenset()
    assert book.remove("dadadada", 1.0).name == "new"
