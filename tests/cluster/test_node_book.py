"""Members by certificate: names are unique, removal is for good, the document reads back."""

from __future__ import annotations

import json

import pytest

from swarmnode.cluster.node_book import KEPT_SERIALS, NodeBook
from swarmnode.errors import Conflict, JoinRefused, PeerNotFound
from swarmnode.ids import NodeId

ATTIC, DEN = NodeId("a" * 32), NodeId("d" * 32)


def two() -> NodeBook:
    book = NodeBook()
    book.issued(ATTIC, "attic", 2**158 + 1, 100.0)
    book.issued(DEN, "den", 2, 200.0)
    return book


def test_a_renewal_keeps_the_latest_serials() -> None:
    book = two()
    for serial in range(10, 20):
        book.issued(DEN, "den", serial, 300.0)
    (record,) = (r for r in book.records() if r.node == DEN)
    assert record.serials == tuple(range(20 - KEPT_SERIALS, 20))
    assert record.expires_s == 300.0


@pytest.mark.parametrize("by", ["attic", ATTIC])
def test_a_removed_node_is_revoked_and_gets_no_certificate_again(by: str) -> None:
    book = two()
    assert book.remove(by, 50.0).node == ATTIC
    assert book.revoked() == {ATTIC}
    with pytest.raises(JoinRefused, match="removed"):
        book.issued(ATTIC, "attic", 3, 400.0)
    with pytest.raises(PeerNotFound, match="there are: den"):
        book.remove(by, 51.0)


def test_a_name_is_free_again_once_its_node_is_removed() -> None:
    book = two()
    new = NodeId("e" * 32)
    with pytest.raises(Conflict, match="'attic'"):
        book.issued(new, "attic", 5, 1.0)
    book.remove("attic", 1.0)
    book.issued(new, "attic", 5, 1.0)
    assert book.remove("attic", 2.0).node == new, "the name means the node that is still in"
    assert book.revoked() == {ATTIC, new}


def test_a_new_name_is_noted_once() -> None:
    book = two()
    assert book.renamed(DEN, "cellar")
    assert not book.renamed(DEN, "cellar")
    assert not book.renamed(NodeId("f" * 32), "x")
    assert book.remove("cellar", 1.0).node == DEN


def test_the_document_reads_back_with_large_serials() -> None:
    book = two()
    book.remove("den", 9.5)
    again = NodeBook.from_json(json.loads(json.dumps(book.as_json())))
    assert again.records() == book.records()
    assert again.revoked() == {DEN}
