"""What other machines say reaches a terminal as letters only."""

from __future__ import annotations

import pytest

from swarmnode.ui.plain_text import plain
from swarmnode.ui.sentences import sentence

EVIL = "evil\x1b[2J\x1b]0;owned\x07\nfake line\u202eabc\x9b31m"


@pytest.mark.parametrize("text", [EVIL, "\x00", "\u2028", "\u200b", "\x7f"])
def test_nothing_but_letters(text: str) -> None:
    assert plain(text).isprintable()
    assert len(plain(text)) == len(text)


def test_letters_stay() -> None:
    assert plain("den-2 läuft 蜂") == "den-2 läuft 蜂"


@pytest.mark.parametrize(
    ("event", "key"),
    [
        ("peer_joined", "name"),
        ("peer_left", "name"),
        ("copy_refused", "name"),
        ("coordinator_lost", "reason"),
        ("new", "x"),
    ],
)
def test_an_event_is_one_line_whatever_a_member_calls_itself(event: str, key: str) -> None:
    assert sentence(event, {key: EVIL}).isprintable()
